"""One kind of tensors of a rule that sees matrices: its kernels, and their launches."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from rulec.compiler.ir import Program, Result, Stage
from rulec.compiler.layout import Layout
from rulec.kernel.nest import Nest
from rulec.kernel.place import COL, MATRIX
from rulec.language.expr.node import Node, Op
from rulec.language.expr.static import settings
from rulec.standalone.cases import Version

from .coded import CodedKernel, bound_in, coded_in
from .cuda_gap import EXTENTS, GapKernel, Targets, Words
from .plan import GIVEN, given_lines, pack_width
from .stage import StageKernel


class File(Protocol):
    """The file of a kind: its name and dtype, the names of its members, and its printer of scalar values."""

    name: str
    program: Program
    layout: Layout
    singles: list[str]
    members: dict[str, str]
    totals: list[list[Node]]
    threads: int
    texts: list[str]

    def cannot(self, why: str) -> None:
        """Raises CannotBuild with this reason."""

    def scalar_lines(self) -> tuple[list[str], list[str]]:
        """The statements for the row of a tensor, and those for its new numbers."""

    def type_of(self, name: str) -> str:
        """The C type of the member for an array or a number on the GPU, up to its name."""

    def shapes_text(self, kind: int) -> str:
        """The shapes of a kind of tensors, in words."""


#: The words of a tensor in a call after its addresses.
_PER_CALL = ("even", "index", "t", *EXTENTS)
_WIDE = "const bool wide = per_call[1];  // whether all its addresses are multiples of 16"

#: The line for a tensor's row of the table, and its name: a kernel without columns does not read it.
ROW_LINE, ROW_USED = re.compile(r"    const int64_t place = .*\n"), re.compile(r"\bplace\b")

#: The sizes of values with these letters, in C.
SIZES = {"": "1", "b": "batch", "bi": "batch * rows", "bj": "batch * cols", "bij": "view->size"}


def letters_of(result: Result) -> str:
    """The letters of the axes of a result within a tensor."""
    return "".join(c for c in result.axes.letters if c in "bij")


@dataclass(frozen=True)
class Cut:
    """How a stage cuts tensors into blocks: tiles whose threads take `pack` neighbours; chunks where it is 0."""

    pack: int
    columns: bool = False
    apart: bool = False


@dataclass(frozen=True)
class Launch:
    """A launch of a kernel: the table whose lines are its blocks, and its arguments; or a part of total `part`."""

    kernel: str
    table: str
    arguments: Sequence[str]
    part: int | None = None
    repeats: str = ""


class KindKernels:
    """A program of the rule, under a number: its kernels and their launches."""

    def __init__(self, main: File, version: Version, number: int, alone: bool) -> None:
        self.main, self.version, self.number = main, version, number
        self.name = main.name if alone else f"{main.name}_{number}"
        self.program: Program = version.program
        self.layout: Layout = version.layout
        self.reduced = [r for stage in self.program.stages for r in stage.reduces]
        slots = {r.name for r in self.reduced}
        #: The states of rows, columns and matrices, and those that are numbers on the GPU.
        narrow = [b for b in self.program.states if not b.axes.elementwise]
        late = {s.buffer for s in self.program.finish}
        self.vectors = [b.name for b in narrow if not b.axes.number]
        self.singles = [b.name for b in narrow if b.axes.number and b.name in late]
        #: The numbers that the host knows; and the arrays of a tensor, with its gradient.
        self.hosted = [b.name for b in narrow if b.axes.number and b.name not in late]
        stored = bound_in(self.program, self.layout)
        #: The addresses that the program gives, and the words of a tensor as stages and as gaps call them.
        self.addressed = [b for b in stored if b not in slots] + self.vectors + self.singles
        self.typed = ["p", "g", *(b for b in self.addressed if b != "p")]
        results = [f"{r.name} result" for r in self.reduced]
        self.bound = [*stored, *self.vectors, *self.singles, *results, "work"]
        shown = [f"{b} slots" if b in slots else b.removesuffix(" result") for b in self.bound]
        self.per_call = [*given_lines(self.program), *_PER_CALL]
        self.words = Words(shown, self.per_call, main.totals[number], main.cannot)
        self.cuts = list(dict.fromkeys(self.cut_of(stage) for stage in self.program.stages if stage.roots))

    @cached_property
    def file(self) -> File:
        """The file with the program of this kind."""
        file = copy.copy(self.main)
        file.program, file.layout, file.singles = self.program, self.layout, self.singles
        return file

    # Kernels

    def cut_of(self, stage: Stage) -> Cut:
        nest = Nest(self.program, self.layout, stage)
        if not nest.shaped:
            return Cut(0)
        pack = pack_width(self.program, self.layout, stage)
        return Cut(pack, bool(nest.totals(COL)), nest.sees(COL) or nest.sees(MATRIX))

    def texts(self) -> list[str]:
        """The kernels."""
        texts = [text for i, stage in enumerate(self.program.stages) if stage.roots for text in self._stage(i)]
        return texts + [kernel.text() for kernel in self.gaps.values()]

    def _stage(self, index: int) -> list[str]:
        program, layout, stage = self.program, self.layout, self.program.stages[index]
        shaped = self.cut_of(stage).pack > 0
        kind = CodedKernel if coded_in(program, stage, layout) else StageKernel
        kernel = kind(program, layout, stage, self._stage_name(index), f"{self.name}_element_{index}")
        kernel.bound, kernel.per_call = self.bound, self.per_call
        texts = [text if len(ROW_USED.findall(text)) > 1 else ROW_LINE.sub("", text) for text in kernel.texts()]
        even = f"const bool wide = per_call[{self.call_word('even')}];  // and whether all its lines are"
        return [text.replace(_WIDE, even) for text in texts] if shaped else texts

    def call_word(self, name: str) -> int:
        return len(GIVEN) + self.per_call.index(name)

    def _stage_name(self, index: int) -> str:
        return f"{self.name}_stage_{index}"

    @cached_property
    def gaps(self) -> dict[str, GapKernel]:
        """The kernels for values between stages, and for parts of totals, by name."""
        kernels: dict[str, GapKernel] = {}
        for i, stage in enumerate(self.program.stages):
            for total in self._totals_in(i):
                kernels |= self._part(total)
            vectors = [name for name in stage.vectors if name not in self.iterations]
            if stage.columns or vectors:
                targets = Targets(stage.columns, vectors)
                kernels |= self._gap(f"before_{i}", f"Before stage {i}: the values that it reads.", targets)
        for total in self._totals_in(len(self.program.stages)):
            kernels |= self._part(total)
        if self.program.finish:
            about = "After the last stage: the new states of rows, columns, matrices and tensors."
            kernels |= self._gap("after", about, Targets(stores=self.program.finish))
        return kernels

    def _part(self, total: int) -> dict[str, GapKernel]:
        about = f"Each tensor's part of reduction {total} over all tensors."
        return self._gap(f"part_{total}", about, Targets(part=total))

    def _gap(self, word: str, about: str, targets: Targets) -> dict[str, GapKernel]:
        name = f"{self.name}_{word}"
        return {name: GapKernel(self.program, self.layout, self.words, name, about, targets)}

    def _totals_in(self, gap: int) -> list[int]:
        """The reductions over all tensors that come before a stage."""
        values = set(self.version.plan.gaps[gap].values)
        return [i for i, node in enumerate(self.words.totals) if node in values]

    # Matrices

    @cached_property
    def iterations(self) -> dict[str, Node]:
        """The vectors that are results of newton_schulz."""
        return {v.name: v.value for v in self.program.vectors if v.value.op is Op.NEWTON_SCHULZ}

    def word(self, name: str) -> str:
        """The end of the names of an iteration's tables."""
        return f"{self.number}_{list(self.iterations).index(name)}"

    def source(self, name: str) -> str:
        """The array whose matrices an iteration begins with."""
        value = self.iterations[name]
        operand = value.args[0]
        if operand.op is not Op.LOAD or not self.program.buffer(str(operand.arg)).axes.elementwise:
            self.main.cannot("it computes with matrices between its kernels")
        dtype = settings(value).get("dtype")
        if dtype in ("float32", "float64") and dtype != self.layout.compute:
            self.main.cannot(f"its newton_schulz computes in {dtype}, and its kernels in {self.layout.compute}")
        return str(operand.arg)

    def rounds(self, name: str) -> str:
        """The number of iterations, in C, once the row of a tensor is written."""
        steps = self.iterations[name].args[1]
        if steps.op is Op.CONST:
            return str(int(float(steps.arg)))  # type: ignore[arg-type]
        if steps.op is not Op.SCALAR or int(str(steps.arg)) >= len(self.program.scalars.columns):
            self.main.cannot("the number of its iterations follows from a reduction")
        return f"(long long)row[{steps.arg}]"

    # Launches

    def launches(self) -> list[Launch]:
        """The launches of a step, in their order."""
        launches: list[Launch] = []
        for i, stage in enumerate(self.program.stages):
            launches += [self._launch_gap(f"part_{k}", k) for k in self._totals_in(i)]
            if f"{self.name}_before_{i}" in self.gaps:
                launches.append(self._launch_gap(f"before_{i}"))
            for name in stage.vectors:
                if name in self.iterations:
                    launches += self._launch_iteration(name)
            if stage.roots:
                table = f"BLOCKS_{self.number}_{self.cuts.index(self.cut_of(stage))}"
                tables = [table, *(f"{x}_{self.number}" for x in ("BOUND", "PER_CALL", "TABLE"))]
                launches.append(Launch(self._stage_name(i), table, [*tables, "stays", "scale"]))
            if stage.reduces:
                table = f"JOINS_{self.number}_{i}"
                launches.append(Launch(f"{self.main.name}_join", table, [table]))
        launches += [self._launch_gap(f"part_{k}", k) for k in self._totals_in(len(self.program.stages))]
        return launches + [self._launch_gap("after")] * bool(self.program.finish)

    def _launch_gap(self, word: str, part: int | None = None) -> Launch:
        tables = [f"{x}_{self.number}" for x in ("BOUND", "PER_CALL", "TABLE")]
        more = ["TOTALS"] * bool(self.words.totals)
        return Launch(f"{self.name}_{word}", f"BOUND_{self.number}", [*tables, *more], part)

    def _launch_iteration(self, name: str) -> list[Launch]:
        matrices, square, wide = (f"{x}_{self.word(name)}" for x in ("MATRICES", "SQUARE", "WIDE"))
        prefix = self.main.name
        return [
            Launch(f"{prefix}_squares", wide, [matrices, wide]), Launch(f"{prefix}_scale", wide, [matrices, wide]),
            Launch(f"{prefix}_product", wide, [matrices, square, wide], repeats=self.word(name)),
        ]  # fmt: skip
