"""Prints a program's scalar program as a kernel of CUDA C: a thread for each tensor."""

from __future__ import annotations

from rulec.backend.printer import unique_name
from rulec.compiler.ir import Program
from rulec.language.expr.node import Node, Op, is_boolean

from ..common.scalars import ScalarKernel, argument_of, has_scalars, scalar_leaves, scalar_stage, without_table
from ..cstyle.element import ElementPrinter, literal
from ..cstyle.text import block, call_lines, indented
from ..cstyle.words import RESERVED
from .plan import THREADS
from .words import DIALECT

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
