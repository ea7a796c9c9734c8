"""The functions of the host for one kind of tensors: how stages cut them, where arrays lie, and lines of tables."""

from __future__ import annotations

import re
from collections import Counter

from rulec.array_api.reductions import REDUCTIONS
from rulec.compiler.ir import Result, Stage
from rulec.compiler.layout import ITEM_SIZE
from rulec.kernel.place import ROW, TENSOR, place

from . import cuda_products
from .cuda_gap import EXTENTS
from .cuda_host import filled_c
from .cuda_kernels import SIZES, KindKernels, letters_of
from .cuda_shaped_host import KIND
from .plan import CHUNK, FINISH, GIVEN, TILE


class Kind(KindKernels):
    """A program of the rule, with the functions of the host for its tensors."""

    # Tables

    def tables(self) -> dict[str, int]:
        """The tables of this kind, and the words of a line of each."""
        number = self.number
        tables = {
            f"BOUND_{number}": len(self.bound), f"PER_CALL_{number}": len(GIVEN) + len(self.per_call),
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
            "even": str(self.call_word("even")), "pack": str(max(1, *(cut.pack for cut in self.cuts), 1)),
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
        return f"{self.main.shapes_text(self.number)}: how stages cut them into blocks."

    def _wide(self) -> list[str]:
        narrow = {*self.vectors, *self.singles}
        return [b for b in self.addressed if b not in narrow]

    def _gradient(self) -> list[str]:
        return [f"per_call[{self.call_word('g')}]"]

    def _cut_lines(self) -> list[str]:
        return [
            f"cuts[{k}] = {self.main.name}_tiles(view, {cut.pack}, {int(cut.columns)}, {int(cut.apart)});" if cut.pack
            else f"cuts[{k}] = {self.main.name}_chunks(view);"
            for k, cut in enumerate(self.cuts)
        ]  # fmt: skip

    def _joined(self, stage: Stage, reduction: Result) -> tuple[str, str]:
        """The number of results of a reduction for a tensor, and of the slots that are joined to each."""
        cut = f"cuts[{self.cuts.index(self.cut_of(stage))}]"
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
        lines = {f"{x}_{number}": "1" for x in ("BOUND", "PER_CALL", "TABLE")}
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
                lines.append(f"per_call[{self.call_word(name)}] = {known.get(name) or self._place(name)};")
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
        at = f"bound[{self.bound.index(source)}]" if source in self.bound else f"per_call[{self.call_word(source)}]"
        rounds, matrices = f"plan->rounds[{upper}_ROUNDS_{word}]", f"{upper}_MATRICES_{word}"
        tables = [matrices, f"{upper}_SQUARE_{word}", f"{upper}_WIDE_{word}"]
        return [
            "{", *(f"    {x}" for x in [
                f"{rounds} = {self.rounds(vector)};",
                "/* The last iteration leaves its result where the next stage reads it. */",
                f"const bool even = {rounds} % 2 == 0;",
                f"const long long here = per_call[{self.call_word(vector)}], other = {self._place(f'{vector} other')};",
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
