"""One kind of tensors of a rule that sees matrices: its kernels, and the functions of the host for its tensors."""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from rulec.array_api.reductions import REDUCTIONS
from rulec.compiler.ir import Program, Result, Stage
from rulec.compiler.layout import ITEM_SIZE, Layout
from rulec.kernel.nest import Nest
from rulec.kernel.place import COL, MATRIX, ROW, TENSOR, place
from rulec.language.expr.node import Node, Op
from rulec.language.expr.static import settings
from rulec.standalone.cases import Version

from . import cuda_products
from .coded import CodedKernel, bound_in, coded_in
from .cuda_gap import EXTENTS, GapKernel, Targets, Words
from .cuda_host import filled_c
from .cuda_shaped_host import KIND
from .plan import CHUNK, FINISH, GIVEN, TILE, given_lines, pack_width
from .stage import StageKernel

if TYPE_CHECKING:
    from .cuda_shaped import ShapedFile

#: The words of a tensor in a call after its addresses.
_PER_CALL = ("even", "index", "t", *EXTENTS)
_WIDE = "const bool wide = given[1];  // whether all its addresses are multiples of 16"

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


class Kind:
    """A program of the rule, under a number."""

    def __init__(self, main: ShapedFile, version: Version, number: int, alone: bool) -> None:
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
        self.cuts = list(dict.fromkeys(self._cut(stage) for stage in self.program.stages if stage.roots))

    @cached_property
    def file(self) -> ShapedFile:
        """The file with the program of this kind."""
        file = copy.copy(self.main)
        file.program, file.layout, file.singles = self.program, self.layout, self.singles
        return file

    # Kernels

    def _cut(self, stage: Stage) -> Cut:
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
        shaped = self._cut(stage).pack > 0
        kind = CodedKernel if coded_in(program, stage, layout) else StageKernel
        kernel = kind(program, layout, stage, self._stage_name(index), f"{self.name}_element_{index}")
        kernel.bound, kernel.per_call = self.bound, self.per_call
        texts = [text if len(ROW_USED.findall(text)) > 1 else ROW_LINE.sub("", text) for text in kernel.texts()]
        even = f"const bool wide = given[{self._call('even')}];  // and whether all its lines are"
        return [text.replace(_WIDE, even) for text in texts] if shaped else texts

    def _call(self, name: str) -> int:
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
                table = f"BLOCKS_{self.number}_{self.cuts.index(self._cut(stage))}"
                tables = [table, *(f"{x}_{self.number}" for x in ("BOUND", "GIVEN", "TABLE"))]
                launches.append(Launch(self._stage_name(i), table, [*tables, "stays", "scale"]))
            if stage.reduces:
                table = f"JOINS_{self.number}_{i}"
                launches.append(Launch(f"{self.main.name}_join", table, [table]))
        launches += [self._launch_gap(f"part_{k}", k) for k in self._totals_in(len(self.program.stages))]
        return launches + [self._launch_gap("after")] * bool(self.program.finish)

    def _launch_gap(self, word: str, part: int | None = None) -> Launch:
        tables = [f"{x}_{self.number}" for x in ("BOUND", "GIVEN", "TABLE")]
        more = ["TOTALS"] * bool(self.words.totals)
        return Launch(f"{self.name}_{word}", f"BOUND_{self.number}", [*tables, *more], part)

    def _launch_iteration(self, name: str) -> list[Launch]:
        matrices, square, wide = (f"{x}_{self.word(name)}" for x in ("MATRICES", "SQUARE", "WIDE"))
        prefix = self.main.name
        return [
            Launch(f"{prefix}_squares", wide, [matrices, wide]), Launch(f"{prefix}_scale", wide, [matrices, wide]),
            Launch(f"{prefix}_product", wide, [matrices, square, wide], repeats=self.word(name)),
        ]  # fmt: skip

    # Tables

    def tables(self) -> dict[str, int]:
        """The tables of this kind, and the words of a line of each."""
        number = self.number
        tables = {
            f"BOUND_{number}": len(self.bound), f"GIVEN_{number}": len(GIVEN) + len(self.per_call),
            f"TABLE_{number}": len(self.program.columns),
        }  # fmt: skip
        tables |= {f"BLOCKS_{number}_{k}": len(TILE if cut.pack else CHUNK) for k, cut in enumerate(self.cuts)}
        tables |= {f"JOINS_{number}_{i}": len(FINISH) for i, s in enumerate(self.program.stages) if s.reduces}
        for name in self.iterations:
            lengths = {"MATRICES": cuda_products.MATRIX, "SQUARE": cuda_products.PART, "WIDE": cuda_products.PART}
            tables |= {f"{x}_{self.word(name)}": len(words) for x, words in lengths.items()}
        return tables

    # The host's functions

    def host_lines(self) -> list[str]:
        """The functions of the host for the tensors of this kind."""
        scalars, stores = self.file.scalar_lines()
        self.texts_of_host = self.file.texts
        known = {
            "name": self.main.name, "upper": self.main.name.upper(), "kind": str(self.number),
            "about": self._about(), "cut_count": str(max(1, len(self.cuts))),
            "place_count": str(max(1, len(self._rooms()))), "bounds": str(len(self.bound)),
            "givens": str(len(GIVEN) + len(self.per_call)), "columns": str(len(self.program.columns)),
            "even": str(self._call("even")), "pack": str(max(1, *(cut.pack for cut in self.cuts), 1)),
            "every": " | ".join([*(f"bound[{self.bound.index(b)}]" for b in self._wide()), *self._gradient()]) or "0",
        }  # fmt: skip
        parts = {
            "cuts": self._cut_lines(), "rooms": self._room_lines(), "lines": self._count_lines(),
            "words": self._word_lines(), "scalars": scalars, "stores": stores, "tables": self._table_lines(),
        }  # fmt: skip
        return self._needed(filled_c(KIND, known, parts))

    @staticmethod
    def _needed(lines: list[str]) -> list[str]:
        """The lines without extents that the function for places does not name."""
        (at,) = [i for i, line in enumerate(lines) if line.startswith("    const long long batch = view->batch")]
        rooms = lines[at + 1 : lines.index("    return at;", at)]
        body = "\n".join(line.partition("/*")[0] for line in rooms)
        named = [x for x in EXTENTS if re.search(rf"(?<!>){x}\b", body)]
        texts = ["    const long long " + ", ".join(f"{x} = view->{x}" for x in named) + ";"] * bool(named)
        return [*lines[:at], *texts, *lines[at + 1 :]]

    def _about(self) -> str:
        return f"{self.main.told(self.number)}: how stages cut them into blocks."

    def _wide(self) -> list[str]:
        narrow = {*self.vectors, *self.singles}
        return [b for b in self.addressed if b not in narrow]

    def _gradient(self) -> list[str]:
        return [f"given[{self._call('g')}]"]

    def _cut_lines(self) -> list[str]:
        return [
            f"cuts[{k}] = {self.main.name}_tiles(view, {cut.pack}, {int(cut.columns)}, {int(cut.apart)});" if cut.pack
            else f"cuts[{k}] = {self.main.name}_chunks(view);"
            for k, cut in enumerate(self.cuts)
        ]  # fmt: skip

    def _joined(self, stage: Stage, reduction: Result) -> tuple[str, str]:
        """The number of results of a reduction for a tensor, and of the slots that are joined to each."""
        cut = f"cuts[{self.cuts.index(self._cut(stage))}]"
        where = place(reduction.axes, self.layout)
        if where == TENSOR:
            return "1", f"{cut}.blocks"
        side, count = ("height", "across") if where == ROW else ("width", "deep")
        return f"(view->batch * view->{side})", f"{cut}.{count}"

    def _rooms(self) -> dict[str, str]:
        """The bytes of each array that lives in a step alone."""
        rooms: dict[str, str] = {}
        for stage in self.program.stages:
            for r in stage.reduces:
                size, count = self._joined(stage, r)
                rooms |= {r.name: f"8 * {size} * {count}", f"{r.name} result": f"8 * {size}"}
        for b in self.program.buffers:
            if b.role == "scratch":
                rooms[b.name] = f"{ITEM_SIZE[self.layout.dtype(b.name)]} * view->size"
        real = ITEM_SIZE[self.layout.compute]
        rooms |= {v.name: f"{real} * {SIZES[letters_of(v)]}" for v in self.program.vectors}
        rooms["work"] = f"8 * ({self._work()})"
        for name in self.iterations:
            short = "(view->height < view->width ? view->height : view->width)"
            rooms |= {f"{name} other": f"{real} * view->size"}
            rooms |= {f"{name} {x}": f"{real} * view->batch * {short} * {short}" for x in ("gram", "weight")}
            parts = " * ".join(f"{self.main.name}_parts(view->{x}, {cuda_products.EDGE})" for x in ("height", "width"))
            rooms[f"{name} squares"] = f"8 * view->batch * {parts}"
        return rooms

    def _work(self) -> str:
        """The doubles that every gap's kernel has room in."""
        counts = [Counter(kernel.sizes) for kernel in self.gaps.values()]
        most = {size: max(c[size] for c in counts) for size in dict.fromkeys(s for c in counts for s in c)}
        return " + ".join(f"{count} * {size}" for size, count in most.items()) or "0"

    def _room_lines(self) -> list[str]:
        return [
            f"places[{k}] = {self.main.name}_room(&at, {size});  /* {name} */"
            for k, (name, size) in enumerate(self._rooms().items())
        ]

    def _place(self, name: str) -> str:
        return f"places[{list(self._rooms()).index(name)}]"

    def _count_lines(self) -> list[str]:
        upper, number = self.main.name.upper(), self.number
        lines = {f"{x}_{number}": "1" for x in ("BOUND", "GIVEN", "TABLE")}
        lines |= {f"BLOCKS_{number}_{k}": f"cuts[{k}].blocks" for k in range(len(self.cuts))}
        for i, stage in enumerate(self.program.stages):
            sizes = [self._joined(stage, r)[0] for r in stage.reduces]
            counts = ["1" if size == "1" else f"{self.main.name}_parts({size}, {self.main.threads})" for size in sizes]
            if counts:
                lines[f"JOINS_{number}_{i}"] = " + ".join(counts)
        for name in self.iterations:
            short, long = (
                f"{self.main.name}_parts(view->height {sign} view->width ? view->height : view->width, "
                f"{cuda_products.EDGE})" for sign in "<>"
            )  # fmt: skip
            word = self.word(name)
            lines |= {f"MATRICES_{word}": "view->batch", f"SQUARE_{word}": f"view->batch * {short} * {short}"}
            lines[f"WIDE_{word}"] = f"view->batch * {short} * {long}"
        return [f"plan->lines[{upper}_{table}] += {count};" for table, count in lines.items()]

    def _word_lines(self) -> list[str]:
        """The statements for the addresses of a tensor, and for the other words of a call."""
        lines = []
        for i, name in enumerate(self.bound):
            text = f"(long long)tensor->{self.main.members[name]}" if name in self.addressed else self._place(name)
            lines.append(f"bound[{i}] = {text};")
        known = {
            "g": f"(long long)tensor->{self.main.members['g']}", "index": "index", "t": "tensor->step + 1",
            **{x: f"view->{x}" for x in EXTENTS},
        }  # fmt: skip
        for name in self.per_call:
            if name != "even":
                lines.append(f"given[{self._call(name)}] = {known.get(name) or self._place(name)};")
        return lines

    def _table_lines(self) -> list[str]:
        name, upper, number, lines = self.main.name, self.main.name.upper(), self.number, []
        for k, cut in enumerate(self.cuts):
            word, table = "tiles" if cut.pack else "chunks", f"next[{upper}_BLOCKS_{number}_{k}]"
            lines.append(f"{table} = {name}_fill_{word}({table}, cuts + {k}, place);")
        for i, stage in enumerate(self.program.stages):
            for r in stage.reduces:
                size, terms = self._joined(stage, r)
                table, code = f"next[{upper}_JOINS_{number}_{i}]", REDUCTIONS[r.value.op].code
                places = f"{self._place(r.name)}, {self._place(f'{r.name} result')}"
                lines += [f"{table} = {name}_fill_joins(", f"    {table}, {places}, {size}, {terms}, {code});"]
        for vector in self.iterations:
            lines += self._matrix_lines(vector)
        return lines

    def _matrix_lines(self, vector: str) -> list[str]:
        upper, word, source = self.main.name.upper(), self.word(vector), self.source(vector)
        at = f"bound[{self.bound.index(source)}]" if source in self.bound else f"given[{self._call(source)}]"
        rounds, matrices = f"plan->rounds[{upper}_ROUNDS_{word}]", f"{upper}_MATRICES_{word}"
        tables = [matrices, f"{upper}_SQUARE_{word}", f"{upper}_WIDE_{word}"]
        return [
            "{", *(f"    {x}" for x in [
                f"{rounds} = {self.rounds(vector)};",
                "/* The last iteration leaves its result where the next stage reads it. */",
                f"const bool even = {rounds} % 2 == 0;",
                f"const long long here = given[{self._call(vector)}], other = {self._place(f'{vector} other')};",
                f"const long long addresses[] = {{{at}, even ? here : other, even ? other : here,",
                f"    {', '.join(self._place(f'{vector} {x}') for x in ('gram', 'weight', 'squares'))}}};",
                f"long long *lines[] = {{{', '.join(f'next[{x}]' for x in tables)}}};",
                f"{self.main.name}_fill_matrices(",
                f"    view, addresses, {ITEM_SIZE[self.layout.dtype(source)]}, "
                f"plan->matrices[{upper}_ROUNDS_{word}], lines);",
                f"plan->matrices[{upper}_ROUNDS_{word}] += view->batch;",
                *(f"next[{x}] = lines[{k}];" for k, x in enumerate(tables)),
            ]), "}",
        ]  # fmt: skip
