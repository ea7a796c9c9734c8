"""Takes numbers of whole tensors out of sums that statistics read: `sum(a*x)` becomes `a*sum(x)`.

LAMB's update is a trust ratio times a direction, and the ratio is known after the stage that has direction and gradient
in registers. With the ratio outside, this stage measures `sum(update*g)` too, and the last stage does not read the
gradient again. A factor is taken out only where the sum is then known after fewer stages. Sums of the rule stay.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial, reduce
from math import prod
from typing import cast

from rulec.compiler.axes import AxisInference
from rulec.compiler.ir import Program, Store
from rulec.language.expr.node import Node, Op, const, node, rewrite, walk

#: The levels of sums within one tensor that a number of the tensor is the same for.
_WITHIN = ("tensor", "matrix", "row", "col")


def with_factors_outside(program: Program, inference: AxisInference, level: Callable[[Node], int]) -> Program:
    """The program of one stage with the factors of its statistics' sums outside.

    `level` gives the number of stages to run before a value is known. Values that the rule itself reads stay.
    """
    (stage,) = program.stages
    names = {b.name for b in program.statistics}
    of_rule = [s.value for s in stage.stores if s.buffer not in names]
    of_rule += [] if program.skip is None else [program.skip]
    change = _Factors(inference, level).outside
    done = {value: value for value in walk(of_rule)}
    values = rewrite([s.value for s in stage.stores], change, done)
    stores = tuple(Store(s.buffer, value) for s, value in zip(stage.stores, values, strict=True))
    sites = {done.get(value, value): site for value, site in program.sites.items()}
    return replace(program, stages=(replace(stage, stores=stores),), sites=sites)


@dataclass(frozen=True)
class _Factors:
    """Splits the products of one program into numbers of a tensor and values of its elements."""

    inference: AxisInference
    level: Callable[[Node], int]

    def outside(self, value: Node) -> Node:
        """A sum as numbers times a sum that is known after fewer stages; any other value as it is."""
        if value.op is not Op.SUM or value.arg not in _WITHIN:
            return value
        (operand,) = value.args
        numbers, rest = self._split(operand)
        if rest is None or not numbers or self.level(rest) >= self.level(operand):
            return value
        return _product(*numbers, node(Op.SUM, rest, value.arg))

    def _split(self, value: Node) -> tuple[list[Node], Node | None]:
        """The numbers that multiply a value, and what they multiply: None where the value is a number itself."""
        axes = self.inference.axes(value)
        if not axes.elementwise:
            return ([value], None) if set(axes.letters) <= {"k", "n"} else ([], value)
        if value.op is Op.NEG:
            numbers, rest = self._split(value.args[0])
            return [const(-1), *numbers], rest
        if value.op is Op.MUL:
            sides = [self._split(side) for side in value.args]
            numbers = [number for some, _ in sides for number in some]
            return numbers, _product(*(rest for _, rest in sides if rest is not None)) if numbers else value
        if value.op is Op.DIV and set(self.inference.axes(value.args[1]).letters) <= {"k", "n"}:
            numbers, rest = self._split(value.args[0])
            return [node(Op.DIV, const(1), value.args[1]), *numbers], rest
        moved = _change(value)
        if moved is None:
            return [], value
        numbers, rest = self._split(moved)
        return (numbers, rest) if numbers else ([], value)


def _change(value: Node) -> Node | None:
    """What a parameter is moved by, of `(p - x) - p` and `(p + x) - p`; None for any other value."""
    if value.op is not Op.SUB:
        return None
    new, old = value.args
    if new.op not in (Op.SUB, Op.ADD) or new.args[0] is not old:
        return None
    return node(Op.NEG, new.args[1]) if new.op is Op.SUB else new.args[1]


def _product(*factors: Node) -> Node:
    """The product of some values, with their constants as one."""
    constant = prod(cast(float, f.arg) for f in factors if f.op is Op.CONST)
    others = [f for f in factors if f.op is not Op.CONST]
    return reduce(partial(node, Op.MUL), others if constant == 1 else [const(constant), *others])
