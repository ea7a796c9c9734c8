"""Prints a program as CUDA C: for each stage the function of an element, and the kernel that calls it.

The scalar program becomes a kernel with a thread for each tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

from rulec.backend.printer import unique_name
from rulec.compiler.ir import Program, Stage
from rulec.compiler.layout import Layout
from rulec.errors import BackendUnsupported
from rulec.kernel.place import is_shaped
from rulec.language.expr.node import Node, Op, is_boolean

from ..common.scalars import ScalarKernel, argument_of, has_scalars, scalar_leaves, scalar_stage, without_table
from ..common.text import about
from ..cstyle.dialect import block, call_lines, comment, indented
from ..cstyle.element import ElementPrinter, literal
from ..cstyle.words import RESERVED, words_used
from .coded import CodedKernel, coded_in
from .format_words import format_functions
from .plan import THREADS, kernel_name
from .stage import StageKernel
from .words import DIALECT, FINISH_KERNEL, parts_used, types_used


def kernel_source(program: Program, layout: Layout, narrow: bool = False) -> str:
    """The source of all kernels of a program; BackendUnsupported for an operation without a spelling in CUDA C.

    If `narrow`, gradients may lie at any address while other arrays move 16 bytes at a time.
    """
    kernels = []
    for index, stage in enumerate(program.stages):
        if stage.roots:
            element = "element" if len(program.stages) == 1 else f"element_{index}"
            kind = _kind(program, layout, stage)
            printed = kind(program, layout, stage, kernel_name(program, index), element)
            printed.narrow_gradient = narrow
            kernels += printed.texts()
    kernels = [*format_functions([form for _, form in layout.formats], "\n".join(kernels)), *kernels]
    if any(stage.reduces for stage in program.stages):
        kernels.append(FINISH_KERNEL)
    return file_text(program, f"{program.name} by the cupy backend: {layout.text()}.", kernels)


def _kind(program: Program, layout: Layout, stage: Stage) -> type[StageKernel]:
    if not coded_in(program, stage, layout):
        return StageKernel
    if is_shaped(program, stage, layout):
        raise BackendUnsupported("cupy", "states in codes in a stage with rows and columns", program.name)
    return CodedKernel


def file_text(program: Program, title: str, kernels: list[str]) -> str:
    """The file of these kernels of a program and the kernel of its scalar program, under a title."""
    head = [*comment([f"{title} Printed by rulec.", "", *about(program)]), ""]
    return with_words([*kernels, *scalars_kernel(program)], head)


def with_words(kernels: Sequence[str], head: Sequence[str] = ()) -> str:
    """The text of these kernels after the types and functions that they use; `head` are the first lines."""
    parts = parts_used("\n".join(kernels))
    words = words_used("\n".join([*parts, *kernels]), DIALECT)
    types = types_used("\n".join([*words, *parts, *kernels]))
    texts = ["\n".join([*head, *types]), *words, *parts, *kernels]
    return "\n\n".join(text.rstrip("\n") for text in texts) + "\n"


#: The index of a tensor's value in an array, by the level of the array.
_INDEX = {"tensor": "i", "group": "group", "model": "0"}


def scalars_kernel(program: Program) -> list[str]:
    """The kernel, or nothing for an empty scalar program."""
    return [_CudaScalars(program).text()] if has_scalars(program) else []


class _CudaScalars(ScalarKernel):
    """The kernel of one program. `new` has the names of the arrays for new states."""

    def __init__(self, program: Program) -> None:
        taken = set(RESERVED | DIALECT.reserved)
        super().__init__(program, scalar_leaves(program), taken)
        self.new = {s.buffer: unique_name(f"{s.buffer}_new", taken) for s in program.scalars.stores}
        self.printer = ElementPrinter(
            DIALECT.backend, without_table(program), scalar_stage(program), {}, literal, reserved=frozenset(taken),
            known=self.names.get,
        )  # fmt: skip

    def text(self) -> str:
        """The kernel."""
        inputs = ["int64_t tensors", "const void *counts", "int64_t narrow", "const int64_t *groups",
                 "const double *hyper", "int64_t group_count"]  # fmt: skip
        arrays = [*(f"const double *{name}" for name in self.at.values()), *(f"double *{x}" for x in self.new.values())]
        head = f'extern "C" __global__ void __launch_bounds__({THREADS}) scalars'
        about = "The scalar table, a row for each tensor; `narrow` where counts are floats."
        lines = call_lines(head, [[*inputs, *arrays, "double *table"]], "")
        return "\n".join([f"// {about}", *lines, "{", *indented(self._body()), "}"])

    def _body(self) -> list[str]:
        types = {name: "bool" if is_boolean(v) else "double" for v, name in self.printer.names.items()}
        reads = [f"const double {name} = {self._read(leaf)};" for leaf, name in self.names.items()]
        rows = [self._row(i, c.name, c.value) for i, c in enumerate(self.program.scalars.columns)]
        return [
            "const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;",
            *block("if (i >= tensors)", ["return;"]),
            *["const int64_t group = groups[i];"] * any("group]" in line for line in reads),
            *reads, *(f"const {types[name]} {name} = {text};" for name, text in self.printer.lines()),
            *[f"double *const row = table + {len(self.program.columns)} * i;"] * bool(rows), *rows,
            *(f"{self.new[s.buffer]}[i] = {self.printer.text(s.value)};" for s in self.program.scalars.stores),
        ]  # fmt: skip

    def _row(self, index: int, name: str, value: Node) -> str:
        line = f"row[{index}] = {self.printer.text(value)};"
        return line if f" {name};" in line else f"{line}  // {name}"

    def _read(self, leaf: Node) -> str:
        """A leaf's value."""
        argument = argument_of(leaf)
        if argument is not None:
            return f"{self.at[argument]}[{_INDEX[self.level(argument)]}]"
        if leaf.op is Op.STEP:
            return "1 + (narrow ? ((const float *)counts)[i] : ((const double *)counts)[i])"
        return f"hyper[{self.hyper_line(leaf)} * group_count + group]"
