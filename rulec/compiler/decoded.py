"""States in codes that are read between the stages: a kernel decodes them into scratch memory beforehand.

Kernels alone know the formats: they decode as they read, and encode as they store. A product of matrices, or any other
value between the stages, reads the memory of a state as it is. So a state in codes with such a reader is decoded by an
earlier stage, into scratch memory, and the reader takes that.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from rulec.compiler.ir import Buffer, Column, Program, Result, Stage, Store
from rulec.compiler.names import free_name
from rulec.compiler.stages import ELEMENT, with_reads
from rulec.language.expr.node import Node, Op, node, rewrite, walk


def decoded_between(program: Program, coded: Collection[str]) -> Program:
    """The program with no read of the states `coded` outside its stages; the same object where there is none."""
    first = _first_reads(program, coded)
    if not first:
        return program
    taken = {b.name for b in program.buffers} | {c.name for c in program.columns} | {v.name for v in program.vectors}
    taken |= {r.name for stage in program.stages for r in stage.reduces}
    scratch = {state: free_name(f"{state}_decoded", taken) for state in first}
    stages = _with_stores(program.stages, first, scratch)
    buffers = (*program.buffers, *(Buffer(name, "scratch", ELEMENT) for name in scratch.values()))
    return _reading(replace(program, buffers=buffers, stages=stages), scratch)


def _first_reads(program: Program, coded: Collection[str]) -> dict[str, int]:
    """The states in codes that are read between the stages, and the first stage with such a read before it."""
    first: dict[str, int] = {}
    for index, wanted in enumerate(program.gaps if coded else ()):
        for value in walk(wanted):
            if value.op is Op.LOAD and value.arg in coded:
                first.setdefault(str(value.arg), index)
    return first


def _with_stores(stages: Sequence[Stage], first: Mapping[str, int], scratch: Mapping[str, str]) -> tuple[Stage, ...]:
    """The stages with the stores of decoded states: in a stage that reads the state anyway, or in a new one."""
    done, front = [*stages], []
    for state, index in first.items():
        load = node(Op.LOAD, state)
        store = Store(scratch[state], load)
        reading = [i for i in range(index) if load in set(walk(stages[i].roots))]
        if reading:
            at = reading[-1]
            done[at] = replace(done[at], stores=(*done[at].stores, store))
        else:
            front.append(store)
    return (Stage(stores=tuple(front)), *done) if front else tuple(done)


def _reading(program: Program, scratch: Mapping[str, str]) -> Program:
    """The program whose values between the stages read scratch memory in the place of states."""
    memo = {node(Op.LOAD, state): node(Op.LOAD, name) for state, name in scratch.items()}

    def changed(value: Node) -> Node:
        return rewrite([value], lambda n: n, memo)[0]

    late = tuple(Column(c.name, changed(c.value)) for c in program.late)
    vectors = tuple(Result(v.name, changed(v.value), v.axes) for v in program.vectors)
    finish = tuple(Store(s.buffer, changed(s.value)) for s in program.finish)
    skip = None if program.skip is None else changed(program.skip)
    sites = {changed(value): site for value, site in program.sites.items()}
    labels = dict(program.labels)
    for value, label in program.labels.items():
        labels.setdefault(memo.get(value, value), label)
    program = replace(
        program, late=late, vectors=vectors, finish=finish, skip=skip, joins=tuple(map(changed, program.joins)),
        sites=sites, labels=labels,
    )  # fmt: skip
    return replace(program, stages=with_reads(program, program.stages))
