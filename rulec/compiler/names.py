"""Names for the compiler's values: the author's name, else short words for the value or for its use."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from itertools import islice

from rulec.compiler.ir import Program
from rulec.language.expr.node import Kind, Node, Op, walk
from rulec.language.expr.ops import having
from rulec.language.expr.static import settings

#: The longest name of an expression's words; beyond it, the purpose of the value says more.
_LONGEST = 32
#: The longest words of an operand, and the most values in a name. A norm is shorter than the sum in it.
_MOST = 2 * _LONGEST

_NUMBERS = {0.0: "zero", 1.0: "one", 2.0: "two"}
#: Words between the names of two operands, and before those of one or two.
_BETWEEN: Mapping[Op, str] = {
    Op.ADD: "_plus_", Op.SUB: "_minus_", Op.MUL: "_", Op.DIV: "_over_", Op.MOD: "_mod_", Op.EQ: "_is_",
    Op.NE: "_is_not_", Op.LT: "_below_", Op.LE: "_at_most_", Op.GT: "_above_", Op.GE: "_at_least_", Op.AND: "_and_",
    Op.OR: "_or_",
}  # fmt: skip
_BEFORE: Mapping[Op, str] = having("word")
_LEAVES = (Op.LOAD, Op.HYPER, Op.MODEL_HYPER, Op.FACT, Op.RESULT)


def free_name(wanted: str, taken: set[str]) -> str:
    """`wanted` as an identifier, or the first free one of `wanted_2`, `wanted_3`, ...; it is added to `taken`."""
    wanted = re.sub(r"\W", "_", wanted)
    name, count = wanted, 2
    while name in taken:
        name, count = f"{wanted}_{count}", count + 1
    taken.add(name)
    return name


def value_name(program: Program, value: Node, otherwise: str, taken: set[str]) -> str:
    """The name of a value: the author's, the words of a short expression, its purpose, or `otherwise`."""
    label = program.labels.get(value)
    return free_name(label or words(program, value) or _purpose(program, value) or otherwise, taken)


def words(program: Program, value: Node) -> str:
    """A short expression as a name: `1 - beta1` is `one_minus_beta1`, a norm of p `norm_p`; empty for a long one."""
    text = _Words(program).top(value)
    return text if len(text) <= _LONGEST and re.match(r"[^\W\d]", text) else ""


class _Words:
    """The words of a program's values; empty for a value without words, or with too many for a name.

    Each value is visited once. Every value adds a letter to the words that it stands in, so an expression of more
    values than a name has letters is not read to its end.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.known: dict[Node, str] = {}

    def top(self, value: Node) -> str:
        """The words of the expression of a value, also where the value has a label."""
        parts = [*islice(walk(value.args, self.program.labels), _MOST)]
        if len(parts) == _MOST:
            return ""
        for part in parts:
            self.known[part] = _short(self._expression(part))
        return _short(self._expression(value))

    def of(self, value: Node) -> str:
        """The words of an operand."""
        label = self.program.labels.get(value)
        if label:
            return re.sub(r"\W", "_", label)
        return self.known[value] if value in self.known else self.top(value)

    def _expression(self, value: Node) -> str:
        if value.op.kind is Kind.LEAF:
            return self._leaf(value)
        if value.op.kind is Kind.REDUCE or value.op is Op.QUANTILE:
            return self._reduction(value)
        operands = [self.of(a) for a in value.args]
        if not operands or not all(operands) or len(operands) > 2:
            return ""
        return self._operation(value, operands)

    def _leaf(self, value: Node) -> str:
        if value.op is Op.CONST:
            number = float(value.arg)  # type: ignore[arg-type]
            return _NUMBERS.get(number) or (str(int(number)) if number.is_integer() and 2 < number < 1000 else "")
        if value.op is Op.STEP:
            return "t" if value.arg is None else f"{value.arg}_t"
        if value.op is Op.SCALAR:
            return self.program.columns[int(value.arg)].name  # type: ignore[call-overload]
        return re.sub(r"\W", "_", str(value.arg)) if value.op in _LEAVES else ""

    def _reduction(self, value: Node) -> str:
        operand, level = self.of(value.args[0]), str(settings(value).get("per", value.arg))
        if not operand:
            return ""
        return f"{value.op.symbol}_{operand}{'' if level == 'tensor' else f'_{level}'}"

    def _operation(self, value: Node, operands: list[str]) -> str:
        first = value.args[0]
        if value.op is Op.SQRT and first.op is Op.SUM and (squared := _squared(first.args[0])) is not None:
            inner = self.of(squared)
            return inner and self._reduction(first).replace(f"sum_{inner}_squared", f"norm_{inner}")
        if _squared(value) is not None:
            return f"{operands[0]}_squared"
        if value.op is Op.POW:
            return f"{operands[0]}_{'t' if value.args[1].op is Op.STEP else f'to_{operands[1]}'}"
        if value.op in _BETWEEN:
            return _BETWEEN[value.op].join(operands)
        return "_".join([_BEFORE[value.op], *operands]) if value.op in _BEFORE else ""


def _short(text: str) -> str:
    """The words of an operand; empty where they are too many for a name."""
    return text if len(text) <= _MOST else ""


def _squared(value: Node) -> Node | None:
    """The value `x` in a product `x*x`; None for other values."""
    return value.args[0] if value.op is Op.MUL and value.args[0] is value.args[1] else None


def _purpose(program: Program, value: Node) -> str:
    """The use of a value in the author's line that reads it: `update_divisor` for the divisor in `update`."""
    parents = _parents(program)
    if value not in parents:
        return ""
    reader = line = parents[value]
    while line not in program.labels:
        if line not in parents:
            return ""
        line = parents[line]
    if value.op.kind is Kind.REDUCE:
        return f"{value.op.symbol}_for_{program.labels[line]}"
    role = "divisor" if reader.op is Op.DIV and reader.args[1] is value else _ROLES.get(reader.op, "part")
    return f"{program.labels[line]}_{role}"


_ROLES: Mapping[Op, str] = {
    Op.MUL: "factor", Op.ADD: "term", Op.SUB: "term", Op.WHERE: "choice", Op.MINIMUM: "bound", Op.MAXIMUM: "bound",
}  # fmt: skip


@functools.lru_cache(maxsize=8)
def _parents(program: Program) -> dict[Node, Node]:
    """Value -> the first value with it as an operand."""
    readers: dict[Node, Node] = {}
    for reader in walk(_roots(program)):
        for operand in reader.args:
            readers.setdefault(operand, reader)
    return readers


def _roots(program: Program) -> list[Node]:
    stores: Iterator[Node] = (s.value for stage in program.stages for s in stage.stores)
    return [*stores, *([] if program.skip is None else [program.skip])]
