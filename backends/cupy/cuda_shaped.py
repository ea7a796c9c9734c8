"""A rule with matrices as one file of CUDA C: kernels for each kind of tensor, and functions to call them."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from rulec.array_api.reductions import REDUCTIONS
from rulec.backend.printer import StagePrinter, identifier, unique_name
from rulec.compiler.axes import AxisInference
from rulec.compiler.ir import Program, Stage
from rulec.compiler.layout import Layout
from rulec.kernel.place import is_shaped
from rulec.language.expr.node import FACTS, WORDS, Node, Op
from rulec.language.expr.text import expression_text
from rulec.standalone.cases import Family, oriented, values
from rulec.standalone.prose import introduction, vendored

from ..common.python_standalone import Parts
from ..cstyle.dialect import comment, indented
from ..cstyle.element import ElementPrinter, literal
from ..cstyle.words import words_used
from . import cuda_products
from .coded import decodes
from .cuda_file import HOST_C, CudaFile
from .cuda_host import ELEMENTS, filled_c
from .cuda_kernels import Launch
from .cuda_kind import Kind
from .cuda_shaped_host import FUNCTIONS, HOST
from .format_words import format_functions
from .plan import CHUNK, FINISH, THREADS, TILE
from .print import with_words
from .words import finish_kernel
from .work import MOST_PIECES, TILE_SIZE, WIDEST

#: The dimensions of a tensor, at most.
MOST_DIMENSIONS = 8

#: How tensors of two and more dimensions are matrices, by the rule's `view`.
_VIEWED = {
    "": [
        "view.rows = tensor->shape[tensor->ndim - 2];", "view.cols = tensor->shape[tensor->ndim - 1];",
        "for (long long d = 0; d < tensor->ndim - 2; ++d)", "    view.batch *= tensor->shape[d];",
    ],
    "rest": [
        "view.rows = tensor->shape[0];", "view.cols = 1;",
        "for (long long d = 1; d < tensor->ndim; ++d)", "    view.cols *= tensor->shape[d];",
    ],
}  # fmt: skip


class ShapedFile(CudaFile):
    """The text of the file.

    Tensors of one kind share a program. A step launches each stage once for all tensors of a kind, and between the
    stages a kernel with a block for each tensor computes what the next stage reads.
    """

    matrix_functions = frozenset({Op.NEWTON_SCHULZ})
    evaluates = False
    locals = (*CudaFile.locals, "index", "place", "at", "next", "view", "plan", "cuts", "places", "done", "lines",
              "even", "here", "other", "addresses")  # fmt: skip
    known_facts = frozenset({*FACTS, *(f"dim{d}" for d in range(MOST_DIMENSIONS))})
    threads = THREADS

    def refuse(self, whole: Family) -> None:
        """CannotBuild where a program of the rule has no form here."""
        self.family = whole
        if self.rule.evaluate is not None:
            self.cannot("it is evaluated at another point than it is trained, and sees rows or columns")
        if self.rule.inputs:
            self.cannot(f"it needs the input {next(iter(self.rule.inputs))}")
        for case in whole.cases:
            self._refuse(case.program)

    def _refuse(self, program: Program) -> None:
        if program.skip is not None:
            self.cannot("it skips steps, and what is written always takes them")
        if not any(stage.stores for stage in program.stages):
            self.cannot("its step changes no element of a tensor")
        if program.rule.view.keys() - {"flatten", "short"} or program.parts:
            self.cannot("it sees more axes than those of matrices")
        if any(n.op is Op.FACT and n.arg not in (*self.known_facts, "machine_eps", *WORDS) for n in values(program)):
            self.cannot("it rounds parts of tensors at random")
        if any(s.buffer for s in program.finish if "n" not in program.buffer(s.buffer).axes.letters):
            self.cannot("a state that is one number of all tensors follows from reductions, and it sees their shapes")
        if any(n.op is Op.STEP and n.arg for n in values(program)):
            self.cannot("it counts the steps of the model, and sees the shapes of tensors")

    def begin(self) -> None:
        """Finds the kinds of tensors, and the names of the file."""
        whole, rule = self.family, self.family.rule
        versions = [
            (case, v) for case in whole.cases for v in oriented(rule, case.program, (), self.dtype, self.storage)
        ]  # fmt: skip
        self.totals: list[list[Node]] = [[*v.program.joins] for _, v in versions]
        self._check_totals([v.program for _, v in versions])
        for _, version in versions:
            self._check_layout(version.program, version.layout)
        #: The truths of the conditions of each kind, and whether it sees matrices transposed.
        self.conditions = [(case.truths, v.turned) for case, v in versions]
        self.turns = any(v.turned for _, v in versions)
        self.moves, self.counts_model = [], False
        self.kinds = [Kind(self, v, i, len(versions) == 1) for i, (_, v) in enumerate(versions)]
        taken = {"step", "shape", "ndim", "param", "grad", "seed", "number"}
        stored = dict.fromkeys(b for kind in self.kinds for b in [*kind.addressed, *kind.hosted] if b != "p")
        self.members = {b: unique_name(identifier(b), taken) for b in stored} | {"p": "param", "g": "grad"}
        self.counted = self.members

    def _check_totals(self, programs: Sequence[Program]) -> None:
        """CannotBuild where kinds of tensors have different reductions over all tensors."""
        sites = [[p.sites[n] for n in p.joins] for p in programs]
        if any(each != sites[0] for each in sites):
            self.cannot("its sums over all tensors depend on the shape of a tensor")
        for program in programs:
            inference = AxisInference(program)
            if any("n" not in inference.axes(n.args[0]).letters for n in program.joins):
                self.cannot("it takes a sum over groups")

    def _check_layout(self, program: Program, layout: Layout) -> None:
        if layout.formats and any(is_shaped(program, stage, layout) for stage in program.stages):
            self.cannot("it sees rows and columns of states in codes")
        if not decodes(program, layout, THREADS):
            self.cannot("a thread takes more neighbouring elements than a block of a format has")

    # The file

    def text(self) -> str:
        """The whole file."""
        head = comment([*introduction(self.rule), "", *vendored()])
        kernels = self._kernels().rstrip("\n")
        space = f"namespace {self.name}_device {{\n\n{kernels}\n\n}}  // namespace {self.name}_device"
        names = dict.fromkeys(launch.kernel for kind in self.kinds for launch in kind.launches())
        if self.totals[0]:
            names[f"{self.name}_join"] = None
        uses = [f"using {self.name}_device::{name};" for name in names]
        return "\n".join([*head, "", space, *uses, "", *self._host(), ""])

    def _kernels(self) -> str:
        texts = [text for kind in self.kinds for text in kind.texts()]
        if self.totals[0] or any(kind.reduced for kind in self.kinds):
            texts.append(finish_kernel(f"{self.name}_join"))
        sources = {
            (k.layout.dtype(k.source(name)), k.layout.compute) for k in self.kinds for name in k.iterations
        }  # fmt: skip
        if len(sources) > 1:
            self.cannot("its iterations begin with matrices of different dtypes")
        texts += [cuda_products.device_text(self.name, *source) for source in sources]
        formats = list(dict.fromkeys(form for kind in self.kinds for _, form in kind.layout.formats))
        return with_words([*format_functions(formats, "\n".join(texts)), *texts])

    # The host's part

    def _host(self) -> list[str]:
        each = [[*kind.host_lines(), ""] for kind in self.kinds]
        tables = self._table_words()
        shown = "\n".join([*(line for lines in each for line in lines), *self._total_lines()])
        conditions = self._kind_lines()
        words = words_used("\n".join([*(t for k in self.kinds for t in k.texts_of_host), *conditions]), HOST_C)
        iterates = any(kind.iterations for kind in self.kinds)
        known = {
            "name": self.name, "upper": self.name.upper(), "elements": str(ELEMENTS), "threads": str(THREADS),
            "defaults": ", ".join(literal(x) for x in self.defaults.values()), "chunk": str(len(CHUNK)),
            "tile": str(len(TILE)), "finish_line": str(len(FINISH)), "tile_size": str(TILE_SIZE),
            "widest": str(WIDEST), "pieces": str(MOST_PIECES), "kind_count": str(len(self.kinds)),
            "widths": ", ".join(map(str, tables.values())), "edge": str(cuda_products.EDGE),
            "matrix_words": str(len(cuda_products.MATRIX)), "part_words": str(len(cuda_products.PART)),
            "bytes": "8" if self.layout.compute == "float64" else "4",
        }  # fmt: skip
        parts = self._shaped_structs(tables) | {
            "words": [line for text in words for line in (*text.rstrip("\n").split("\n"), "")],
            "viewed": _VIEWED["rest" if self.family.rule.view.get("flatten") == "rest" else ""],
            "oriented": self._oriented_lines(), "kinds": conditions,
            "cutters": self._functions(shown, filling=False), "writers": self._functions(shown, filling=True),
            "matrices": cuda_products.HOST.splitlines() * iterates,
            "each": [line for lines in each for line in lines], "totals": self._total_lines(),
            "totals_room": self._total_room(), "counted": self._cases(f"{self.name}_count_{{k}}(&view, plan);"),
            "filled": self._cases(
                f"at = {self.name}_fill_{{k}}(plan, tensors + i, &view, hyper, i, done[{{k}}]++, at, next);"
            ),
            "begun": self._begun_lines(), "arguments": self._argument_lines(), "launches": self._launch_lines(),
        }  # fmt: skip
        return filled_c(HOST, known, parts)

    @staticmethod
    def _functions(shown: str, filling: bool) -> list[str]:
        """The functions for blocks and joins in a text: for filling tables, or the others."""
        called = [text for use, text in FUNCTIONS.items() if use in shown and ("_fill_" in use) == filling]
        return [line for text in called for line in (*text.splitlines(), "")]

    def _table_words(self) -> dict[str, int]:
        """The tables of a step, and the words of a line of each."""
        tables = {"TOTALS": len(FINISH)} if self.totals[0] else {}
        for kind in self.kinds:
            tables |= kind.tables()
        return tables

    def _rounds(self) -> list[str]:
        return [kind.word(name) for kind in self.kinds for name in kind.iterations]

    def _shaped_structs(self, tables: dict[str, int]) -> Parts:
        upper, rounds = self.name.upper(), self._rounds()
        arrays = {b: f"{kind.file.type_of(b)}{self.members[b]};" for kind in self.kinds for b in kind.typed}
        hosted = dict.fromkeys(self.members[b] for kind in self.kinds for b in kind.hosted)
        enums = [f"enum {{ {', '.join(f'{upper}_{x}' for x in [*tables, 'TABLES'])} }};"]
        enums += [f"enum {{ {', '.join(f'{upper}_ROUNDS_{x}' for x in rounds)}, {upper}_ROUNDS }};"] * bool(rounds)
        return {
            "hyper": [f"double {x};" for x in self.fields.values()] + ["unsigned seed;"] * self.seeded,
            "tensor": [*arrays.values(), f"long long ndim, shape[{MOST_DIMENSIONS}], step;",
                       *(f"double {x};" for x in hosted), *["unsigned number;"] * self.seeded],
            "rounds": [f"long long rounds[{upper}_ROUNDS], matrices[{upper}_ROUNDS];"] * bool(rounds),
            "enums": [line for text in enums for line in _wrapped(text)],
        }  # fmt: skip

    def _oriented_lines(self) -> list[str]:
        turn = ["if (view.rows > view.cols) {", "    view.height = view.rows;", "    view.width = view.cols;",
                "    view.rows = view.width;", "    view.cols = view.height;", "}"]  # fmt: skip
        return ["view.height = view.rows;", "view.width = view.cols;", *turn * self.turns]

    # Conditions

    def _condition(self, value: Node) -> str:
        """A condition on a shape in C."""

        def leaf(n: Node) -> str | None:
            name = str(n.arg)
            if name in self.static:
                return literal(self.static[name])
            return self._fact(name, "view.") if n.op in (Op.FACT, Op.NAME, Op.HYPER) else None

        printer: StagePrinter = ElementPrinter(self.form, self.program, Stage(), {}, literal, known=leaf)
        return printer.text(value)

    @staticmethod
    def _fact(name: str, view: str) -> str:
        """A fact of a tensor in C, as a double."""
        texts = {"ndim": "tensor->ndim", "numel": f"{view}size", "rows": f"{view}rows", "cols": f"{view}cols"}
        return f"(double){texts.get(name) or f'tensor->shape[{name[3:]}]'}"

    def _kind_lines(self) -> list[str]:
        """The statements that find the kind of a tensor: -1 where the rule is not for its shape, or needs a matrix."""
        tests = [self._condition(c) for c in self.family.conditions]
        lines = [f"if (tensor->ndim < 0 || tensor->ndim > {MOST_DIMENSIONS})", "    return view;"]
        if self.family.applies is not None:
            lines += [f"if (!({self._condition(self.family.applies)}))", "    return view;"]
        iterate = [f"view.kind == {kind.number}" for kind in self.kinds if kind.iterations]
        ends = [f"if (tensor->ndim < 2 && ({' || '.join(iterate)}))", "    view.kind = -1;"] * bool(iterate)
        if len(self.conditions) == 1:
            return [*lines, "view.kind = 0;", *ends]
        for i, (truths, turned) in enumerate(self.conditions):
            shape = _either([_both(tests, each) for each in truths])
            turn = [f"view.height {'>' if turned else '<='} view.width"] * self._turned_beside(i)
            lines += [f"if ({' && '.join([*[shape] * bool(tests), *turn])})", f"    view.kind = {i};"]
        return lines + ends

    def shapes_text(self, kind: int) -> str:
        """The shapes of a kind of tensors, in words."""
        truths, turned = self.conditions[kind]
        shapes = [
            " and ".join(
                expression_text(c) if truth else f"not ({expression_text(c)})"
                for c, truth in zip(self.family.conditions, each, strict=True)
            )
            for each in truths
        ]
        turn = (" and more rows than columns" if turned else " and no more rows than columns") * self._turned_beside(
            kind
        )
        return f"Tensors with {' or '.join(filter(None, shapes)) or 'any shape'}{turn}"

    def _turned_beside(self, place: int) -> bool:
        """Whether a kind has the same shapes as another, which sees them in the other orientation."""
        truths = self.conditions[place][0]
        return len([each for each, _ in self.conditions if each is truths]) > 1

    def leaf(self, value: Node, state: str) -> str | None:
        """As of all files; facts of shapes are of the tensor and its view."""
        name = str(value.arg)
        if value.op is Op.FACT and name in self.known_facts:
            return self._fact(name, "view->")
        return super().leaf(value, state)

    # Totals, tables and launches

    def _total_room(self) -> list[str]:
        count = len(self.totals[0])
        if not count:
            return []
        return [
            f"plan->lines[{self.name.upper()}_TOTALS] = {count};",
            f"{self.name}_room(&plan->scratch, 8 * {count} * (count + 1));",
        ]

    def _total_lines(self) -> list[str]:
        """The statements for the reductions over all tensors: the parts of tensors, and where the totals go."""
        if not self.totals[0]:
            return []
        codes = [str(REDUCTIONS[n.op].code) for n in self.totals[0]]
        count, table = len(codes), f"next[{self.name.upper()}_TOTALS]"
        return [
            f"static const int kinds[] = {{{', '.join(codes)}}};",
            f"const long long parts = {self.name}_room(&at, 8 * {count} * (plan->count + 1));",
            f"for (int k = 0; k < {count}; ++k)",
            f"    {table} = {self.name}_fill_joins(",
            f"        {table}, parts + 8 * plan->count * k, parts + 8 * ({count} * plan->count + k), 1,",
            "        plan->count, kinds[k]);",
        ]

    def _cases(self, text: str) -> list[str]:
        lines = []
        for k in range(len(self.kinds)):
            lines += [f"case {k}:", f"    {text.format(k=k)}", "    break;"]
        return lines

    def _begun_lines(self) -> list[str]:
        count = f"{self.name.upper()}_ROUNDS"
        return [f"for (int k = 0; k < {count}; ++k)", "    plan->matrices[k] = 0;"] * bool(self._rounds())

    def _argument_lines(self) -> list[str]:
        """The addresses of tables on the GPU."""
        upper = self.name.upper()
        return [f"long long *{table.lower()} = words + plan->at[{upper}_{table}];" for table in self._table_words()]

    def _launch_lines(self) -> list[str]:
        """The launches of a step: those of all kinds up to a reduction over all tensors, and then this reduction."""
        queues = [kind.launches() for kind in self.kinds]
        lines: list[str] = []
        for total in range(len(self.totals[0])):
            for queue in queues:
                while True:
                    launch = queue.pop(0)
                    lines += self._launch(launch)
                    if launch.part == total:
                        break
            lines += self._joined(total)
        return lines + [line for queue in queues for launch in queue for line in self._launch(launch)]

    def _joined(self, total: int) -> list[str]:
        line = f"long long *total_{total} = totals + {len(FINISH) * total};"
        return [line, *self._call(f"{self.name}_join", "1", [f"total_{total}"])]

    def _launch(self, launch: Launch) -> list[str]:
        upper = self.name.upper()
        if not launch.repeats:
            return self._call(launch.kernel, f"plan->lines[{upper}_{launch.table}]", launch.arguments)
        matrices, square, wide = launch.arguments
        return [
            f"for (int round = 0; round < plan->rounds[{upper}_ROUNDS_{launch.repeats}]; ++round) {{",
            "    for (int step = 0, turn = round % 2; step < 3; ++step) {",
            f"        long long **parts = step < 2 ? &{square.lower()} : &{wide.lower()};",
            f"        void *arguments[] = {{&{matrices.lower()}, parts, &turn, &step}};",
            f"        const long long blocks = plan->lines[step < 2 ? {upper}_{square} : {upper}_{wide}];",
            f"        error = {self.name}_launch(error, {launch.kernel}, blocks, arguments, stream);",
            "    }", "}",
        ]  # fmt: skip

    def _call(self, kernel: str, blocks: str, arguments: Sequence[str]) -> list[str]:
        addresses = ", ".join(f"&{x.lower()}" for x in arguments)
        return [
            "{", *indented([
                f"void *arguments[] = {{{addresses}}};",
                f"error = {self.name}_launch(error, {kernel}, {blocks}, arguments, stream);",
            ]), "}",
        ]  # fmt: skip


def _both(tests: Sequence[str], truths: Sequence[bool]) -> str:
    """The condition that each test has its truth."""
    if len(tests) == 1:
        return tests[0] if truths[0] else f"!({tests[0]})"
    return " && ".join(f"({test})" if truth else f"!({test})" for test, truth in zip(tests, truths, strict=True))


def _either(ways: Sequence[str]) -> str:
    """The condition that one of several holds."""
    return ways[0] if len(ways) == 1 else f"({' || '.join(f'({way})' for way in ways)})"


def _wrapped(text: str) -> list[str]:
    """An enumeration on as many lines as it needs."""
    return textwrap.wrap(text, 110, subsequent_indent="    ", break_long_words=False)
