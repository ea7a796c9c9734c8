"""Prints a stage over elements whose states are in codes: threads decode their elements, update and encode them.

A block takes a part of a chunk at a time, with some neighbouring elements for each thread, so the threads of a block
of a format lie side by side. Chunks begin at multiples of every block of the formats.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rulec.compiler.ir import Program, Stage
from rulec.compiler.layout import Layout, scale_name
from rulec.formats import Format
from rulec.kernel.place import ELEMENT, used_buffers
from rulec.kernel.quantized import CodedBuffer, coded_buffers, is_flat

from ..cstyle.dialect import block, indented
from ..cstyle.element import Parameter
from ..cstyle.format_words import CodedNames, function_name
from .plan import THREADS, bound_lines, pack_width
from .stage import StageKernel
from .words import DIALECT

#: The variables of these kernels beside those of all stages.
_LOCALS = frozenset({"part", "count", "whole", "Codes", "over_format"})


def coded_in(program: Program, stage: Stage, layout: Layout) -> list[tuple[str, Format]]:
    """The states in codes that a stage loads or stores, with their formats."""
    used = used_buffers(program, stage)
    return [(name, form) for name, form in layout.formats if name in used]


def bound_in(program: Program, layout: Layout) -> list[str]:
    """The arrays of a tensor with the same address at every call: those of `bound_lines`, and the scales of states."""
    return [*bound_lines(program), *(scale_name(name) for name, _ in layout.formats)]


def scales_of(layout: Layout, states: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Line -> the scales of each tensor."""
    return {scale_name(name): [s[scale_name(name)] for s in states] for name, _ in layout.formats}


def coded_width(program: Program, layout: Layout, stage: Stage) -> int:
    """The neighbouring elements of a thread: those of a pack, or more where a format's block has more than threads."""
    longest = max((form.block for _, form in coded_in(program, stage, layout)), default=0)
    return max(pack_width(program, layout, stage), longest // THREADS)


def decodes(program: Program, layout: Layout, threads: int) -> bool:
    """Whether kernels with this many threads in a block read and write codes themselves.

    No stage with codes sees rows or columns; a thread's elements lie in one block of each format, and its threads in
    one block of the grid.
    """
    return is_flat(program, layout) and all(
        coded_width(program, layout, stage) <= form.block <= threads * coded_width(program, layout, stage)
        for stage in program.stages
        for _, form in coded_in(program, stage, layout)
    )


class CodedKernel(StageKernel):
    """The kernel of a stage without rows and columns, with states in codes."""

    dialect = replace(DIALECT, reserved=DIALECT.reserved | _LOCALS)

    def __init__(self, program: Program, layout: Layout, stage: Stage, name: str, element: str) -> None:
        super().__init__(program, layout, stage, name, element)
        self.wide = coded_width(program, layout, stage)
        buffers = coded_buffers(layout, self.writer.printer.loads(), self.nest.stored)
        self._coded: dict[str, CodedBuffer] = {buffer.name: buffer for buffer in buffers}
        self._names = CodedNames(layout, self.writer.taken)

    def _addresses(self) -> list[str]:
        """The pointers; of a state in codes those to its codes and its scales."""
        return [*super()._addresses(), *(line for b in self._coded.values() for line in self._pointers(b))]

    def _address(self, name: str, kind: str) -> list[str]:
        return [] if name in self._coded else super()._address(name, kind)

    def _pointers(self, buffer: CodedBuffer) -> list[str]:
        const, name = "" if buffer.stored else "const ", buffer.name
        kinds = {
            self._names.codes[name]: (f"{const}{buffer.format.code_dtype}_t", name),
            self._names.scales[scale_name(name)]: (f"{const}float", scale_name(name)),
        }
        return [f"{kind} *const {at} = at<{kind}>({self._word(line)});" for at, (kind, line) in kinds.items()]

    def _flat(self) -> list[str]:
        wide = self.wide
        return [
            *self._begin(), *self._totals("tensor"),
            "// The threads of a format's block find its scale together, so all threads take every part of the chunk.",
            "#pragma unroll 1",
            f"for (int64_t part = chunk.start; part < chunk.stop; part += {wide} * blockDim.x) {{",
            *indented([
                f"const int64_t i = part + {wide} * threadIdx.x;",
                f"const int count = i + {wide} <= chunk.stop ? {wide} : i < chunk.stop ? (int)(chunk.stop - i) : 0;",
                f"const bool whole = wide && count == {wide};",
                *(f"Pack<{self._kind(p)}, {wide}> {self._pack(p)};" for p in self._arrays()),
                *self._loads(), *self._in_parts(self._elements()), *self._written(self._stores()),
            ]),
            "}",
            *self._leave("chunk"),
        ]  # fmt: skip

    def _arrays(self) -> list[Parameter]:
        """The parameters with a value for each element."""
        return [p for p in self.parameters if p.kind == "buffer" or p.place == ELEMENT]

    @staticmethod
    def _kind(p: Parameter) -> str:
        return p.type.removesuffix(" *").removeprefix("const ")

    def _pack(self, p: Parameter) -> str:
        """The variable of the thread's elements of an array."""
        return self.writer.names[p.of]

    def _loads(self) -> list[str]:
        loaded = {*self.writer.printer.loads(), *self.stage.reads}
        arrays = [p for p in self._arrays() if p.of in loaded and p.of not in self._coded]
        packs = [f"{self._pack(p)} = {self._pack_of(p, 'i')};" for p in arrays]
        lines = self._moved(packs, [f"{self._pack(p)}.at[e] = {p.name}[i + e];" for p in arrays])
        return lines + [self._called("decode", b) for b in self._coded.values() if b.loaded]

    def _elements(self) -> list[str]:
        arguments = {
            "i": "e",
            "position": "i + e",
            "origin": "i",
            **{p.name: f"{self._pack(p)}.at" for p in self._arrays()},
        }
        loop = block(f"for (int e = 0; e < {self.wide}; ++e)", block("if (e < count)", self._call(arguments)))
        return ["#pragma unroll", *loop]

    def _stores(self) -> list[str]:
        stored = [p for p in self._arrays() if p.of in self.nest.stored and p.of not in self._coded]
        packs = [f"pack<{self.wide}>({p.name} + i) = {self._pack(p)};" for p in stored]
        lines = self._moved(packs, [f"{p.name}[i + e] = {self._pack(p)}.at[e];" for p in stored])
        return lines + [self._called("encode", b) for b in self._coded.values() if b.stored]

    def _moved(self, packs: list[str], singles: list[str]) -> list[str]:
        """The statements that move the thread's elements of some arrays: in packs, or one by one."""
        if not packs:
            return []
        loop = block(f"for (int e = 0; e < {self.wide}; ++e)", block("if (e < count)", singles))
        return ["if (whole) {", *indented(packs), "} else {", *indented(["#pragma unroll", *loop]), "}"]

    def _called(self, way: str, buffer: CodedBuffer) -> str:
        """The call that decodes or encodes the thread's elements of a state."""
        codes, scales = self._names.codes[buffer.name], self._names.scales[scale_name(buffer.name)]
        values = f"{self.writer.names[buffer.name]}.at"
        return f"{way}_{function_name(buffer.format)}({codes}, {scales}, i, count, whole, {values});"
