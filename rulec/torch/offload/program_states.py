"""The states that travel before and after each part of a program, as it reads and writes them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from rulec.compiler.ir import Program
from rulec.compiler.layout import array_buffers, has_chance, scale_name
from rulec.language.expr.node import Op, walk
from rulec.runtime.buckets.launch import Launch


@dataclass(frozen=True)
class StageStates:
    """The states with arrays for a part of a step: `up` are copied up before it, `all` are read or written by it."""

    up: frozenset[str]
    all: frozenset[str]


@lru_cache(maxsize=1024)
def arrays_of_stage(program: Program, stage: int) -> frozenset[str]:
    """The buffers that a stage reads or writes."""
    of = program.stages[stage]
    loads = (str(n.arg) for n in walk(of.roots) if n.op is Op.LOAD)
    return frozenset([*loads, *(store.buffer for store in of.stores)])


@lru_cache(maxsize=1024)
def states_of_stage(program: Program, stage: int) -> StageStates:
    """The states of a stage.

    A state that the stage writes and does not read is not copied up, unless the stage may leave it as it is. That is
    for the last stage alone: launches may wait between the others, and their states are copied down and up.
    """
    of = program.stages[stage]
    reads = _arrays_of(program, (str(n.arg) for n in walk(of.roots) if n.op is Op.LOAD))
    everything = reads | _arrays_of(program, (store.buffer for store in of.stores))
    stays = stage < len(program.stages) - 1 or program.skip is not None
    return StageStates(everything if stays else reads, everything)


@lru_cache(maxsize=1024)
def states_written(program: Program) -> frozenset[str]:
    """The states with arrays that a step writes."""
    stores = [*(store for stage in program.stages for store in stage.stores), *program.finish]
    return _arrays_of(program, (store.buffer for store in stores))


def _arrays_of(program: Program, buffers: Iterable[str]) -> frozenset[str]:
    """The names of the arrays of states among some buffers; a state in codes has two."""
    chosen = {*buffers}
    states = [b.name for b in array_buffers(program) if b.role == "state" and b.name in chosen]
    return frozenset([*states, *map(scale_name, states)])


@lru_cache(maxsize=1024)
def takes_pieces(program: Program) -> bool:
    """Whether the states of a tensor can be brought piece by piece.

    They can where stages that read or write states look at one element at a time, and nothing between stages does.
    """
    apart = program.rule.inputs or program.rule.moves or has_chance(program)
    if apart or not all(b.axes.elementwise and b.role != "scratch" for b in array_buffers(program)):
        return False
    between = [*(str(n.arg) for n in walk(program.between) if n.op is Op.LOAD), *(s.buffer for s in program.finish)]
    if _arrays_of(program, between):
        return False
    stages = [stage for k, stage in enumerate(program.stages) if states_of_stage(program, k).all]
    return not any(stage.reduces or stage.vectors or stage.reads for stage in stages)


def wanted_states(launch: Launch, stage: int | None, buffers: Sequence[str]) -> StageStates:
    """The states of a stage of a launch; where it is None, the states among `buffers`."""
    program = launch.version.program
    return _between(program, tuple(buffers)) if stage is None else states_of_stage(program, stage)


@lru_cache(maxsize=1024)
def _between(program: Program, buffers: tuple[str, ...]) -> StageStates:
    names = _arrays_of(program, buffers)
    return StageStates(names, names)
