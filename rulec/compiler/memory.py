"""Histories without copies: the entries change their arrays in a circle, and the oldest array gets the new value.

A push moves every entry one place up, which a program says as stores of loads. Such a chain of states is a ring.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rulec.compiler.ir import Program, Stage, Store
from rulec.compiler.layout import Layout, scale_name
from rulec.language.expr.node import Op, walk

#: States from the newest to the oldest.
Ring = tuple[str, ...]


@functools.lru_cache(maxsize=512)
def ringed(program: Program) -> tuple[Program, tuple[Ring, ...]]:
    """The program without the stores that only move entries, and its rings.

    The new value of a ring's first state is stored in the array of its last. Afterwards `turned` gives every state its
    array. A program without a ring is the same object.
    """
    stage = program.stages[-1]
    rings = _rings(program, stage)
    if not rings:
        return program, ()
    moved = {name: ring for ring in rings for name in ring[1:]}
    firsts = {ring[0]: ring[-1] for ring in rings}
    stores = tuple(
        Store(firsts.get(s.buffer, s.buffer), s.value) for s in stage.stores if s.buffer not in moved
    )  # fmt: skip
    return replace(program, stages=(*program.stages[:-1], replace(stage, stores=stores))), rings


def _rings(program: Program, stage: Stage) -> tuple[Ring, ...]:
    """The longest chains of states of which each gets the old value of the one before it."""
    values = {s.buffer: s.value for s in stage.stores}
    wide = {b.name for b in program.states if b.axes.elementwise and b.name in values}
    before = {name: str(v.arg) for name in wide if (v := values[name]).op is Op.LOAD and v.arg in wide - {name}}
    after: dict[str, str] = {}
    for name, source in before.items():
        after.setdefault(source, name)
    late = {str(n.arg) for n in walk(program.between) if n.op is Op.LOAD}
    rings = []
    for first in sorted(after.keys() - before.keys()):
        ring = [first]
        while ring[-1] in after:
            ring.append(after[ring[-1]])
        if late.isdisjoint(ring):
            rings.append(tuple(ring))
    return tuple(rings)


def stored_alike(ring: Ring, layout: Layout) -> bool:
    """Whether the states of a ring can change their arrays: all have one dtype, or one format."""
    return len({(layout.dtype(name), layout.format(name)) for name in ring}) == 1


def turned(states: Mapping[str, Any], rings: tuple[Ring, ...], layout: Layout, turns: int) -> dict[str, Any]:
    """The arrays of the states by name, after some turns of every ring."""
    arrays = dict(states)
    for ring in rings:
        for place, name in enumerate(ring):
            source = ring[(place - turns) % len(ring)]
            arrays[name] = states[source]
            if layout.format(name) is not None:
                arrays[scale_name(name)] = states[scale_name(source)]
    return arrays
