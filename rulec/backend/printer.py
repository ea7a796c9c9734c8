"""Printing for all backends: the values with a line of their own, their order and their names.

A backend has a table from operations to text, `{Op.ADD: "({} + {})", ...}`. The table declares the operations of the
backend: another operation is BackendUnsupported.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from rulec.compiler.ir import Buffer, Program, Stage
from rulec.compiler.layout import kernel_buffers
from rulec.compiler.text import named_values
from rulec.errors import BackendUnsupported
from rulec.language.expr.node import Kind, Node, Op, walk
from rulec.language.parse.located import syntax_tree

#: For each operation, a format with one `{}` per operand, or a function of the operands' texts.
OpTable = Mapping[Op, str | Callable[..., str]]


def identifier(text: str) -> str:
    """A name of a rule as an identifier of a programming language: `adam.m` is `adam_m`."""
    return re.sub(r"\W", "_", text)


def unique_name(text: str, taken: set[str]) -> str:
    """`text` as an identifier outside of `taken`; it is added to `taken`."""
    name = identifier(text)
    while name in taken:
        name += "_"
    taken.add(name)
    return name


def buffer_names(program: Program, reserved: Iterable[str]) -> dict[str, str]:
    """An identifier for each buffer, all different and none reserved."""
    taken = set(reserved)
    return {b.name: unique_name(b.name, taken) for b in program.buffers}


def is_number(text: str) -> bool:
    """Whether a printed expression is a bare number: it has no dtype of its own."""
    return re.fullmatch(r"-?(inf|nan|\d[\d.]*(e[-+]?\d+)?)", text) is not None


def bare(text: str) -> str:
    """An expression of Python without superfluous parentheses."""
    return ast.unparse(syntax_tree(text, "eval"))


@dataclass
class StagePrinter:
    """Prints the values of one stage as lines `name = expression`.

    `load` prints the value of a buffer before the stage, `vector` an element of a vector, `constant` a float64 literal,
    all in the compute dtype. Scalars of the table are printed by their column's name: the backend defines these names
    first. `known` gives the text of any other value computed already, and None for a value to print.

    `quotient` is the form of a quotient by a column of the table, of its operands and of the column's inverse. It is
    empty for a backend that divides; others define inverses beside columns.
    """

    backend: str
    program: Program
    stage: Stage
    ops: OpTable
    constant: Callable[[float], str]
    load: Callable[[str], str] = identifier
    reserved: frozenset[str] = frozenset()
    vector: Callable[[str], str] = identifier
    known: Callable[[Node], str | None] = lambda value: None
    quotient: str = ""
    names: dict[Node, str] = field(default_factory=dict)
    _columns: list[str] = field(default_factory=list)
    _inverses: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        taken = set(self.reserved) | {self.load(b.name) for b in kernel_buffers(self.program)}
        taken |= {self.vector(name) for name in self.stage.reads}
        self._columns = [unique_name(c.name, taken) for c in self.program.columns]
        divisors = self.stage.divisors if self.quotient else []
        self._inverses = {i: unique_name(f"{self._columns[i]}_inverse", taken) for i in divisors}
        named = named_values(self.program, self.stage.roots)
        self.names = {v: unique_name(n, taken) for v, n in named.items()}

    def column(self, index: int) -> str:
        """The name of a column of the scalar table."""
        return self._columns[index]

    def inverses(self) -> dict[str, str]:
        """The names of columns that divide, and of their inverses."""
        return {self._columns[index]: name for index, name in self._inverses.items()}

    def inverse(self, divisor: Node) -> str | None:
        """The name of a divisor's inverse; None for a divisor without one."""
        return self._inverses.get(int(divisor.arg)) if divisor.op is Op.SCALAR else None  # type: ignore[call-overload]

    def columns_used(self) -> list[int]:
        """The columns of the scalar table read by this stage, in order."""
        return sorted({int(n.arg) for n in walk(self.stage.roots) if n.op is Op.SCALAR})  # type: ignore[call-overload]

    def loads(self) -> list[str]:
        """The buffers read by this stage, in the program's order."""
        read = {str(n.arg) for n in walk(self.stage.roots) if n.op is Op.LOAD}
        return [b.name for b in self.program.buffers if b.name in read]

    def lines(self) -> list[tuple[str, str]]:
        """Each named value with its expression, which uses only the names before it."""
        order = [v for v in walk(self.stage.roots) if v in self.names]
        return [(self.names[v], self.text(v, defining=True)) for v in order]

    def there(self, value: Node, defining: bool = False) -> str | None:
        """The text of a value without an operation: a name, a known value, a number, or a load; None for others."""
        if not defining and value in self.names:
            return self.names[value]
        if value.op is Op.CONST:
            return self.constant(float(value.arg))  # type: ignore[arg-type]
        known = None if defining and value.op.kind is not Kind.LEAF else self.known(value)
        if known is not None:
            return known
        if value.op is Op.SCALAR:
            return self.column(int(value.arg))  # type: ignore[call-overload]
        if value.op is Op.LOAD:
            return self.load(str(value.arg))
        return self.vector(str(value.arg)) if value.op is Op.RESULT else None

    def text(self, value: Node, defining: bool = False) -> str:
        """A value as an expression over the names of the lines before it."""
        there = self.there(value, defining)
        if there is not None:
            return there
        inverse = self.inverse(value.args[1]) if value.op is Op.DIV else None
        if inverse is not None:
            return self.quotient.format(*map(self.text, value.args), inverse)
        form = self.ops.get(value.op)
        if form is None or value.op.kind is Kind.LEAF:
            raise BackendUnsupported(self.backend, f"{value.op.symbol!r}", self.program.name)
        operands = [self.text(a) for a in value.args]
        return form.format(*operands) if isinstance(form, str) else form(*operands)


def require_elementwise(backend: str, program: Program) -> Stage:
    """The single stage of an elementwise program; BackendUnsupported for reductions and matrix functions."""
    if not program.elementwise:
        raise BackendUnsupported(backend, "the reductions or matrix functions", program.name)
    return program.stages[0]


def elementwise_buffers(backend: str, program: Program) -> list[Buffer]:
    """The buffers of an elementwise program; BackendUnsupported for inputs and for states of another shape."""
    require_elementwise(backend, program)
    buffers = kernel_buffers(program)
    for buffer in buffers:
        if buffer.role == "input":
            raise BackendUnsupported(backend, f"the input {buffer.name!r}", program.name)
        if not buffer.axes.elementwise:
            raise BackendUnsupported(
                backend, f"the state {buffer.name!r}, which is not kept per element,", program.name
            )
    return buffers
