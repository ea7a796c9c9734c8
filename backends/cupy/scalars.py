"""Prints a program's scalar program as a kernel of CUDA C: a thread for each tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from rulec.backend.printer import unique_name
from rulec.compiler.ir import Program, Stage, Store
from rulec.language.node import Node, Op, is_boolean, node, rewrite, walk

from ..c.print import ElementPrinter
from ..c.text import block, call_lines, indented
from ..c.words import RESERVED
from .plan import THREADS
from .words import DIALECT

_LEAVES = (Op.HYPER, Op.MODEL_HYPER, Op.STEP, Op.FACT, Op.LOAD)


@dataclass(frozen=True)
class Argument:
    """An array that the kernel is given: of `kind` "fact", "state", "level" or "stored", under `key`."""

    kind: str
    key: str


def scalar_arguments(program: Program) -> list[Argument]:
    """The arrays that the kernel is given beside counts, groups, hyper-parameters and the table, in order."""
    found = list(dict.fromkeys(_argument(leaf) for leaf in _leaves(program)))
    stored = [Argument("stored", s.buffer) for s in program.scalars.stores]
    return [a for a in found if a is not None] + stored


def _leaves(program: Program) -> list[Node]:
    scalars = program.scalars
    roots = [*(c.value for c in scalars.columns), *(s.value for s in scalars.stores)]
    return [n for n in walk(roots) if n.op in _LEAVES]


def _argument(leaf: Node) -> Argument | None:
    if leaf.op is Op.FACT:
        return Argument("fact", str(leaf.arg))
    if leaf.op is Op.LOAD:
        return Argument("state", str(leaf.arg))
    return Argument("level", str(leaf.arg)) if leaf.op is Op.STEP and leaf.arg is not None else None


def scalars_kernel(program: Program) -> list[str]:
    """The kernel, where the program has anything that it works out."""
    if not (program.scalars.columns or program.scalars.stores):
        return []
    return [_ScalarKernel(program).text()]


class _ScalarKernel:
    """The kernel of one program. `names` are its leaves' values, `at` the arrays that it is given."""

    def __init__(self, program: Program) -> None:
        self.program = program
        taken = set(RESERVED | DIALECT.reserved)
        self.leaves = _leaves(program)
        self.names = {leaf: unique_name(_word(leaf), taken) for leaf in self.leaves}
        self.arguments = scalar_arguments(program)
        self.at = {a: unique_name(f"{a.key}_{'new' if a.kind == 'stored' else 'at'}", taken) for a in self.arguments}
        self.columns, self.stores, self.printer = self._printer(frozenset(taken))

    def _printer(self, taken: frozenset[str]) -> tuple[list[Node], list[Node], ElementPrinter]:
        """The values with each leaf as a buffer of its name, and what prints them."""
        scalars = self.program.scalars
        stored = [Store(s.buffer, s.value) for s in scalars.stores]
        roots = [*(c.value for c in scalars.columns), *(s.value for s in stored)]
        memo: dict[Node, Node] = {leaf: node(Op.LOAD, name) for leaf, name in self.names.items()}
        values = rewrite(roots, lambda n: n, memo)
        labels = {memo[v]: label for v, label in self.program.labels.items() if v in memo}
        stage = Stage(tuple(Store("", value) for value in values))
        renamed = replace(self.program, labels=labels, buffers=(), late=(), scalars=type(scalars)())
        printer = ElementPrinter(DIALECT.backend, renamed, stage, {}, _constant, str, taken)
        count = len(scalars.columns)
        return values[:count], values[count:], printer

    def text(self) -> str:
        """The kernel."""
        given = ["int64_t tensors", "const void *counts", "int64_t narrow", "const int64_t *groups",
                 "const double *hyper", "int64_t group_count"]  # fmt: skip
        arrays = [f"{'' if a.kind == 'stored' else 'const '}double *{name}" for a, name in self.at.items()]
        head = f'extern "C" __global__ void __launch_bounds__({THREADS}) scalars'
        about = "The scalar table, a row for each tensor; `narrow` where counts are floats."
        lines = call_lines(head, [[*given, *arrays, "double *table"]], "")
        return "\n".join([f"// {about}", *lines, "{", *indented(self._body()), "}"])

    def _body(self) -> list[str]:
        types = {name: "bool" if is_boolean(v) else "double" for v, name in self.printer.names.items()}
        rows = [f"row[{i}] = {self.printer.text(value)};" for i, value in enumerate(self.columns)]
        names = [c.name for c in self.program.scalars.columns]
        return [
            "const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;",
            *block("if (i >= tensors)", ["return;"]),
            *["const int64_t group = groups[i];"] * any("group]" in self._leaf(leaf) for leaf in self.leaves),
            *(f"const double {name} = {self._leaf(leaf)};" for leaf, name in self.names.items()),
            *(f"const {types[name]} {name} = {text};" for name, text in self.printer.lines()),
            *[f"double *const row = table + {len(self.program.columns)} * i;"] * bool(rows),
            *(row if f" {name};" in row else f"{row}  // {name}" for row, name in zip(rows, names, strict=True)),
            *(f"{self.at[Argument('stored', s.buffer)]}[i] = {self.printer.text(value)};"
              for s, value in zip(self.program.scalars.stores, self.stores, strict=True)),
        ]  # fmt: skip

    def _leaf(self, leaf: Node) -> str:
        """Where a leaf's value is read."""
        argument = _argument(leaf)
        if argument is None and leaf.op is Op.STEP:
            return "1 + (narrow ? ((const float *)counts)[i] : ((const double *)counts)[i])"
        if argument is None:
            return f"hyper[{list(self.program.hyper).index(str(leaf.arg))} * group_count + group]"
        return f"{self.at[argument]}[{self._index(argument)}]"

    def _index(self, argument: Argument) -> str:
        letters = _LEVELS.get(argument.key, "kn")
        if argument.kind == "fact":
            letters = "kn"
        elif argument.kind == "state":
            letters = self.program.buffer(argument.key).axes.letters
        return "i" if "n" in letters else "group" if "k" in letters else "0"


_LEVELS: Mapping[str, str] = {"group": "k", "model": ""}


def _word(leaf: Node) -> str:
    if leaf.op is Op.STEP:
        return "t" if leaf.arg is None else f"{leaf.arg}_t"
    return str(leaf.arg)


def _constant(value: float) -> str:
    if value != value:
        return "NAN"
    return repr(value) if abs(value) != float("inf") else ("INFINITY" if value > 0 else "-INFINITY")
