"""Prints a kernel for the numbers between two stages: columns of the scalar table, and states that are numbers.

One block runs it: a thread takes every 256th tensor. Reductions over all tensors are joined in a fixed order, each
before the values of its users.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rulec.backend.printer import identifier, unique_name
from rulec.compiler.ir import Program, Stage, Store
from rulec.language.expr.node import Kind, Node, Op, is_boolean, node, rewrite, walk

from ..common.scalars import without_table
from ..cstyle.dialect import block, call_lines, indented
from ..cstyle.element import ElementPrinter, literal
from ..cstyle.words import LIBRARY, RESERVED
from .plan import GIVEN, THREADS
from .stage import KIND, NOTHING
from .words import DIALECT

_LOCALS = frozenset({"count", "entry", "call", "per_call", "results", "over_all"})
#: The values that a thread reads from memory.
_LEAVES = (Op.RESULT, Op.SCALAR, Op.LOAD, Op.STEP)
_LOOP = "for (int64_t i = threadIdx.x; i < count; i += blockDim.x)"


def is_shared(program: Program, state: str) -> bool:
    """Whether a state is one number for a group or the model."""
    return "n" not in program.buffer(state).axes.letters


@dataclass(frozen=True)
class Lines:
    """The words of a tensor: of its fixed addresses, and of a call; and the results of reductions, a line for each."""

    bound: Sequence[str]
    per_call: Sequence[str]
    results: Sequence[str]


@dataclass(frozen=True)
class Total:
    """A reduction over all tensors of a number of each; `leaf` stands for it in values. It is taken in a `round`."""

    leaf: Node
    op: Op
    part: Node
    round: int


class NumbersKernel:
    """The kernel `name`: it writes some `columns` of the scalar table and some `stores`; `about` is its comment."""

    def __init__(
        self, program: Program, lines: Lines, name: str, about: str, columns: Sequence[int], stores: Sequence[Store]
    ) -> None:  # fmt: skip
        self._program, self._lines, self.name, self._about = program, lines, name, about
        self._totals: dict[Node, Total] = {}
        values = [*(program.columns[i].value for i in columns), *(s.value for s in stores)]
        values = rewrite(values, self._total)
        self._cells = dict(zip(columns, values[: len(columns)], strict=True))
        self._stores = dict(zip([s.buffer for s in stores], values[len(columns) :], strict=True))
        self._taken = RESERVED | DIALECT.reserved | frozenset(LIBRARY) | _LOCALS
        taken = {*self._taken}
        read = [n for n in walk([*values, *(t.part for t in self._totals.values())]) if n.op in _LEAVES]
        #: The variable of each value that is read.
        self._names = {n: unique_name(identifier(self._called(n)), taken) for n in read}
        self._taken = frozenset(taken)

    def _total(self, value: Node) -> Node:
        """The leaf for a reduction over several tensors, else the value itself."""
        if value.op.kind is not Kind.REDUCE or value.arg not in ("group", "model"):
            return value
        rounds = {t.leaf: t.round for t in self._totals.values()}
        after = 1 + max((rounds[n] for n in walk(value.args) if n in rounds), default=-1)
        leaf = node(Op.RESULT, f"total {len(rounds)}")
        return self._totals.setdefault(value, Total(leaf, value.op, value.args[0], after)).leaf

    def _called(self, value: Node) -> str:
        if value.op is Op.SCALAR:
            return self._program.columns[int(value.arg)].name  # type: ignore[call-overload]
        return str(value.arg) if value.op is not Op.STEP else "shared_t" if value.arg else "t"

    def text(self) -> str:
        """The kernel."""
        head = f'extern "C" __global__ void __launch_bounds__({THREADS}) {self.name}'
        inputs = ["int64_t count", "const int64_t *bound", "const int64_t *per_call", "double *table"]
        lines = call_lines(head, [[*inputs, *["const Finish *finish"] * bool(self._lines.results)]], "")
        return "\n".join([f"// {self._about}", *lines, "{", *indented(self._body()), "}"])

    # Its statements

    def _body(self) -> list[str]:
        reads = any(n.op is Op.RESULT and n.arg in self._lines.results for n in self._names)
        lines = ["const double *const results = at<double>(finish->target);"] * reads
        totals = self._totals.values()
        for number in range(1 + max((t.round for t in totals), default=-1)):
            lines += self._round([t for t in totals if t.round == number])
        return lines + self._last()

    def _round(self, totals: Sequence[Total]) -> list[str]:
        """The loop over tensors for some reductions."""
        names = [self._names[t.leaf] for t in totals]
        printer = self._printer([t.part for t in totals])
        parts = [
            f"{name} = joined({KIND[t.op]}, {name}, {printer.text(t.part)});"
            for name, t in zip(names, totals, strict=True)
        ]  # fmt: skip
        return [
            *(f"double {name} = {NOTHING[t.op]};" for name, t in zip(names, totals, strict=True)),
            *block(_LOOP, self._each(printer, parts)),
            *(f"{name} = over_all({KIND[t.op]}, {name});" for name, t in zip(names, totals, strict=True)),
        ]

    def _last(self) -> list[str]:
        """The loop that writes. A number of the model is written when all threads have read it."""
        printer, taken = self._printer([*self._cells.values(), *self._stores.values()]), {*self._taken}
        shared = {b: unique_name(f"{b}_new", taken) for b in self._stores if is_shared(self._program, b)}
        lines = [f"row[{i}] = {printer.text(value)};" for i, value in self._cells.items()]
        texts = {b: printer.text(value) for b, value in self._stores.items()}
        lines += [f"{self._number(b, 'entry')} = {text};" for b, text in texts.items() if b not in shared]
        kept = [f"{name} = {texts[b]};" for b, name in shared.items()]
        body = block(_LOOP, self._each(printer, lines + (block("if (i == 0)", kept) if kept else [])))
        if not shared:
            return body
        ends = [f"{self._number(b, 'bound')} = {name};" for b, name in shared.items()]
        zeros = [f"double {name} = 0;" for name in shared.values()]
        return [*zeros, *body, "__syncthreads();", *block("if (threadIdx.x == 0 && count > 0)", ends)]

    def _number(self, buffer: str, pointer: str) -> str:
        return f"*at<double>({pointer}[{self._lines.bound.index(buffer)}])"

    def _each(self, printer: ElementPrinter, last: list[str]) -> list[str]:
        """The statements for one tensor: the values that it reads, the named values, and the `last` ones."""
        kinds = {name: "bool" if is_boolean(v) else "double" for v, name in printer.names.items()}
        lines = [line for n in walk(printer.stage.roots) if n.op in _LEAVES for line in self._read(n)]
        lines += [f"const {kinds[name]} {name} = {text};" for name, text in printer.lines()] + last
        pointers = {
            "entry": f"const int64_t *const entry = bound + {len(self._lines.bound)} * i;",
            "call": f"const int64_t *const call = per_call + {len(GIVEN) + len(self._lines.per_call)} * i;",
            "row": f"double *const row = table + {len(self._program.columns)} * i;",
        }
        return [text for name, text in pointers.items() if any(f"{name}[" in line for line in lines)] + lines

    def _read(self, leaf: Node) -> list[str]:
        """The statement that reads a value of a tensor; none for a reduction over tensors."""
        name, kind = str(leaf.arg), "double"
        if leaf.op is Op.RESULT and name not in self._lines.results:
            return []
        if leaf.op is Op.SCALAR:
            truth = is_boolean(self._program.columns[int(name)].value)
            kind, text = "bool" if truth else "double", f"row[{name}]{' != 0' * truth}"
        elif leaf.op is Op.RESULT:
            text = f"results[{self._lines.results.index(name)} * count + i]"
        elif leaf.op is Op.LOAD:
            text = self._number(name, "entry")
        else:
            text = f"(double)call[{len(GIVEN) + self._lines.per_call.index(self._called(leaf))}]"
        return [f"const {kind} {self._names[leaf]} = {text};"]

    def _printer(self, values: Sequence[Node]) -> ElementPrinter:
        return ElementPrinter(
            DIALECT.backend, without_table(self._program), Stage(tuple(Store("", value) for value in values)), {},
            literal, reserved=self._taken, known=self._names.get,
        )  # fmt: skip
