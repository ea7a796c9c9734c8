"""Compiler passes on memory: histories as rings without copies, and Newton-Schulz operands in 16 bits.

A push of a history moves every entry up by one, which a program says as stores of loads. Such a chain of states is a
ring: the entries change their arrays in a circle, and the oldest array gets the new value.

Newton-Schulz rounds its operands and results to 16 bits anyway. Memory of 16 bits for them halves the traffic, and the
bits of a step are the same as with memory in the dtype of arithmetic.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rulec.compiler.ir import Program, Stage, Store
from rulec.compiler.layout import ITEM_SIZE, Layout, scale_name
from rulec.language.expr.node import Node, Op, walk
from rulec.language.expr.static import settings

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


def narrowed(program: Program, layout: Layout) -> Layout:
    """The layout with such scratch and results of a program in the dtype of 16 bits of the function."""
    outside = walk([*program.between, *([] if program.skip is None else [program.skip])])
    uses: dict[Node, list[tuple[Node, int]]] = {}
    for value in outside:
        for place, operand in enumerate(value.args):
            uses.setdefault(operand, []).append((value, place))
    return replace(
        layout,
        dtypes=tuple((b, _scratch_dtype(program, b, uses) or dtype) for b, dtype in layout.dtypes),
        results=tuple((name, dtype) for name, dtype in _results(program, uses).items() if dtype),
    )


def _scratch_dtype(program: Program, buffer: str, uses: dict[Node, list[tuple[Node, int]]]) -> str:
    """The dtype that every reader rounds a scratch buffer to; empty where there is none, or a kernel reads it."""
    if program.buffer(buffer).role != "scratch":
        return ""
    if any(n.op is Op.LOAD and n.arg == buffer for stage in program.stages for n in walk(stage.roots)):
        return ""
    readers = [use for value, each in uses.items() if value.op is Op.LOAD and value.arg == buffer for use in each]
    dtypes = {_rounds(value) if place == 0 else "" for value, place in readers}
    return dtypes.pop() if len(dtypes) == 1 else ""


def _results(program: Program, uses: dict[Node, list[tuple[Node, int]]]) -> dict[str, str]:
    """The dtype of each result of the parameter's shape that only kernels read, by name."""
    stored = {s.value for s in program.finish}
    alone = [r for r in program.vectors if r.axes.elementwise and r.value not in uses and r.value not in stored]
    return {r.name: _rounds(r.value) for r in alone}


def _rounds(value: Node) -> str:
    """The dtype of 16 bits that a function rounds its operand and its result to; empty for any other."""
    dtype = str(settings(value).get("dtype")) if value.op is Op.NEWTON_SCHULZ else ""
    return dtype if ITEM_SIZE.get(dtype) == 2 else ""
