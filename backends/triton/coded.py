"""Prints a stage over elements whose states are in codes: a block is decoded, updated in float32, and encoded.

Blocks of a program are multiples of every block of the formats, so no two programs write one scale or one byte.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rulec.compiler.ir import Program, Stage
from rulec.compiler.layout import Layout, scale_name
from rulec.formats import Format
from rulec.formats.tables import Floats
from rulec.kernel.place import used_buffers
from rulec.kernel.quantized import CodedBuffer, coded_buffers

from .blocks import Block
from .flat import FlatStage
from .format_words import function_name, function_names, words
from .ops import is_bare
from .plan import known_columns
from .stage import call

#: The most elements of a thread in a stage whose blocks were lengthened for those of a format.
_MOST = 16
#: The least threads of a block. Threads that decode and encode wait for one another, and fewer wait less.
_THREADS = 64
#: The registers of a thread on GPUs of NVIDIA, in a stage without reductions. Elements under a mask would take more,
#: and then fewer threads would wait for the memory of all other elements.
REGISTERS = 96
#: The blocks of a chunk of a large tensor. A program reads its scalars once.
TOGETHER = 16


def coded_in(program: Program, stage: Stage, layout: Layout) -> list[tuple[str, Format]]:
    """The states in codes that a stage loads or stores, with their formats."""
    used = used_buffers(program, stage)
    return [(name, form) for name, form in layout.formats if name in used]


def columns_of(program: Program, stage: Stage, layout: Layout) -> list[str]:
    """The columns of `known`: those of `known_columns`, then for each state in codes its scales and its table."""
    coded = [name for name, _ in coded_in(program, stage, layout)]
    return [
        *known_columns(program, stage, layout),
        *(x for name in coded for x in (scale_name(name), table_name(name))),
    ]


def table_name(state: str) -> str:
    """The column of the address of the table of a state's format."""
    return f"{state}::table"


def lengthened(block: Block, coded: Sequence[tuple[str, Format]]) -> Block:
    """A block of a program whose half is a multiple of the block of every format, with enough threads."""
    elements = max([block.elements, *(2 * form.block for _, form in coded)])
    return Block(elements, max(block.threads, min(1024, elements // _MOST)))


def halved(block: Block) -> Block:
    """The block of a stage with states in codes and without reductions, from the block of a stage of floats."""
    return Block(block.elements // 2, max(block.threads // 2, _THREADS))


class Tables:
    """The tables of formats on a device, one after the other in one array of float32."""

    def __init__(self, coded: Sequence[tuple[str, Format]]) -> None:
        parts = [words(form) for _, form in coded]
        self.words: Floats = np.concatenate([np.zeros(0, np.float32), *parts])
        first = np.cumsum([0, *(len(part) for part in parts)])
        self._first = dict(zip((table_name(name) for name, _ in coded), first.tolist(), strict=False))

    def addresses(self, at: int) -> Mapping[str, int]:
        """Column -> address, where the array is at this address."""
        return {name: at + 4 * first for name, first in self._first.items()}


class CodedStage(FlatStage):
    """A stage over blocks of elements with states in codes."""

    def __init__(self, program: Program, layout: Layout, index: int) -> None:
        coded = coded_in(program, program.stages[index], layout)
        self._scales = {name: f"scales_{i}" for i, (name, _) in enumerate(coded)}
        self._words = {name: f"words_{i}" for i, (name, _) in enumerate(coded)}
        forms = [form for _, form in coded]
        self.local_names = frozenset({*self._scales.values(), *self._words.values(), *function_names(forms)})
        super().__init__(program, layout, index)
        self.known = columns_of(program, self.stage, layout)
        buffers = coded_buffers(layout, self.printer.loads(), self.nest.stored)
        self._coded: dict[str, CodedBuffer] = {buffer.name: buffer for buffer in buffers}

    def address_lines(self) -> list[str]:
        """As of all stages, and the addresses of scales and tables."""
        lines = super().address_lines()
        for name in self._coded:
            for variable, column in ((self._scales, scale_name(name)), (self._words, table_name(name))):
                lines.append(f"{variable[name]} = tl.load(known + {self.known.index(column)})")
        return lines

    def _arguments(self) -> list[str]:
        fixed = [x for name in self._coded for x in (self._scales[name], self._words[name])]
        return [*(self.at[a] for a in self.arrays), *fixed, *super()._arguments()[len(self.arrays) :]]

    def pointer_lines(self) -> list[str]:
        """Addresses as pointers: of codes, scales and tables too."""
        lines = super().pointer_lines()
        for name in self._coded:
            for variable in (self._scales[name], self._words[name]):
                lines.append(f"{variable} = {variable}.to(tl.pointer_type(tl.float32))")
        return lines

    def _storage(self, name: str) -> str:
        return self._coded[name].format.code_dtype if name in self._coded else super()._storage(name)

    def _read(self, buffer: str) -> str:
        if buffer not in self._coded:
            return super()._read(buffer)
        text = f"decode_{self._function(buffer)}({', '.join(self._addresses(buffer))}, start, size, ALL, BLOCK)"
        return self.computed(text, "float32")

    def _function(self, buffer: str) -> str:
        return function_name(self._coded[buffer].format)

    def _addresses(self, buffer: str) -> list[str]:
        """The addresses of the codes, the scales and the table of a state."""
        return [self.at[buffer], self._scales[buffer], self._words[buffer]]

    def store_lines(self) -> list[str]:
        """As of all stages; the call that encodes a state may need several lines."""
        return [line for text in super().store_lines() for line in text.split("\n")]

    def _store(self, buffer: str, value: str) -> str:
        if buffer not in self._coded:
            return super()._store(buffer, value)
        if is_bare(value):
            value = f"tl.full((BLOCK,), {value}, tl.float32)"
        else:
            value = f"tl.broadcast_to({value}, (BLOCK,))"
            value += ".to(tl.float32)" * (self.compute != "float32")
        write = "None if stays is None else write" if self.guarded else "None"
        arguments = [*self._addresses(buffer), value, "start", "size", write, "ALL", "BLOCK"]
        return "\n".join(call(f"encode_{self._function(buffer)}", arguments))


def scales_of(layout: Layout, states: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Column -> the scales of each tensor."""
    return {scale_name(name): [s[scale_name(name)] for s in states] for name, _ in layout.formats}
