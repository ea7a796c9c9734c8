"""States in codes inside a kernel: a part of a chunk at a time is decoded into the nearest cache, updated and encoded.

Chunks of main memory begin at multiples of their length, and so of every block: no two threads write one scale or one
byte of codes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rulec.compiler.ir import Program, Stage
from rulec.compiler.layout import Layout, scale_name
from rulec.formats import Format
from rulec.kernel.place import address_lines, bound_arrays, is_shaped, used_buffers

#: The elements of a part, where no block is longer: a few arrays of so many floats fit the nearest cache.
PART = 1024


@dataclass(frozen=True)
class CodedBuffer:
    """A state in codes of one stage: whether the stage reads the old values, and whether it stores new ones."""

    name: str
    format: Format
    loaded: bool
    stored: bool


def coded_buffers(layout: Layout, loaded: Sequence[str], stored: Sequence[str]) -> list[CodedBuffer]:
    """The states in codes of a stage with these loads and stores."""
    used = [(name, form) for name, form in layout.formats if name in {*loaded, *stored}]
    return [CodedBuffer(name, form, name in loaded, name in stored) for name, form in used]


def part_length(layout: Layout) -> int:
    """The elements of a part: a multiple of the length of every block."""
    return max([PART, *(form.block for _, form in layout.formats)])


def is_flat(program: Program, layout: Layout) -> bool:
    """Whether no stage with states in codes needs the row or column of an element."""
    return not any(_is_shaped_in_codes(program, stage, layout) for stage in program.stages)


def _is_shaped_in_codes(program: Program, stage: Stage, layout: Layout) -> bool:
    coded = {name for name, _ in layout.formats}
    return bool(coded.intersection(used_buffers(program, stage))) and is_shaped(program, stage, layout)


def coded_lines(program: Program, layout: Layout) -> list[str]:
    """The lines of an address table: those of `address_lines`, then the scales of states in codes."""
    return [*address_lines(program), *(scale_name(name) for name, _ in layout.formats)]


def coded_arrays(
    program: Program, layout: Layout, params: Sequence[Any], states: Sequence[Mapping[str, Any]]
) -> dict[str, Sequence[Any]]:
    """Line -> the array of each tensor bound to a kernel: those of `bound_arrays`, and scales."""
    scales = [scale_name(name) for name, _ in layout.formats]
    return bound_arrays(program, params, states) | {name: [s[name] for s in states] for name in scales}
