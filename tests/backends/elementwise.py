"""The rules of the library that a backend without stages runs, and those that it must refuse."""

from __future__ import annotations

import rulec
from rulec.compiler.ir import Program
from rulec.testing.cases import SHAPES, buckets_of, loaded


def elementwise_rules() -> list[str]:
    """The rules whose every tensor is updated by one kernel call, with no input but gradients."""
    return [name for name in rulec.rules() if all(_plain(b.program) for b in buckets_of(loaded(name), SHAPES))]


def _plain(program: Program) -> bool:
    wide = all(b.axes.elementwise for b in program.buffers if b.name not in _scalar_states(program))
    return program.elementwise and wide and not any(b.role == "input" for b in program.buffers)


def _scalar_states(program: Program) -> set[str]:
    return {s.buffer for s in program.scalars.stores}
