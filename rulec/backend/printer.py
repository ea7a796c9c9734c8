"""What every backend's printing has in common: which values get a line, in what order, under what names.

A backend gives a table from operations to text, `{Op.ADD: "({} + {})", ...}`; an operation that is not in it is
BackendUnsupported. The table is the declaration of what the backend can express.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from rulec.compiler.ir import Program, Stage
from rulec.compiler.show import named_values
from rulec.errors import BackendUnsupported
from rulec.language.node import Kind, Node, Op, walk

#: For each operation, a format with one `{}` per operand, or a function of the operands' texts.
OpTable = Mapping[Op, str | Callable[..., str]]


def identifier(text: str) -> str:
    """A name of a rule as an identifier of a programming language: `adam.m` is `adam_m`."""
    return re.sub(r"\W", "_", text)


@dataclass
class StagePrinter:
    """Prints the values of one stage as lines `name = expression`.

    `load` prints the value of a buffer as it was before the step, `constant` a float64 literal, both in the compute
    dtype. Scalars of the table are printed by their column's name: the backend defines those first.
    """

    backend: str
    program: Program
    stage: Stage
    ops: OpTable
    constant: Callable[[float], str]
    load: Callable[[str], str] = identifier
    reserved: frozenset[str] = frozenset()
    names: dict[Node, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        named = named_values(self.program, self.stage.roots)
        self.names = {v: self._free(n) for v, n in named.items()}

    def _free(self, name: str) -> str:
        name = identifier(name)
        columns = {self.column(i) for i in range(len(self.program.scalars.columns))}
        while name in self.reserved or name in columns:
            name += "_"
        return name

    def column(self, index: int) -> str:
        """The name of a column of the scalar table."""
        name = identifier(self.program.scalars.columns[index].name)
        return f"{name}_" if name in self.reserved else name

    def columns_used(self) -> list[int]:
        """The columns of the scalar table that this stage reads, in order."""
        return sorted({int(n.arg) for n in walk(self.stage.roots) if n.op is Op.SCALAR})  # type: ignore[call-overload]

    def loads(self) -> list[str]:
        """The buffers this stage reads, in the program's order."""
        read = {str(n.arg) for n in walk(self.stage.roots) if n.op is Op.LOAD}
        return [b.name for b in self.program.buffers if b.name in read]

    def lines(self) -> list[tuple[str, str]]:
        """Each named value with its expression, in an order in which each uses only those before it."""
        order = [v for v in walk(self.stage.roots) if v in self.names]
        return [(self.names[v], self.text(v, defining=True)) for v in order]

    def text(self, value: Node, defining: bool = False) -> str:
        """A value as an expression over the names of the lines before it."""
        if not defining and value in self.names:
            return self.names[value]
        if value.op is Op.CONST:
            return self.constant(float(value.arg))  # type: ignore[arg-type]
        if value.op is Op.SCALAR:
            return self.column(int(value.arg))  # type: ignore[call-overload]
        if value.op is Op.LOAD:
            return self.load(str(value.arg))
        form = self.ops.get(value.op)
        if form is None or value.op.kind is Kind.LEAF:
            raise BackendUnsupported(self.backend, f"{value.op.symbol!r}", self.program.name)
        operands = [self.text(a) for a in value.args]
        return form.format(*operands) if isinstance(form, str) else form(*operands)


def require_elementwise(backend: str, program: Program) -> Stage:
    """The single stage of an elementwise program; BackendUnsupported where there are reductions or matrix functions."""
    if not program.elementwise or program.stages[0].finish:
        raise BackendUnsupported(backend, "the reductions or matrix functions", program.name)
    return program.stages[0]
