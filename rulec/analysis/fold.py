"""A step with some values known, simplified by the algebra of finite numbers.

Unlike the compiler's folding this may take `0*x` for 0: it serves proofs about a rule, and no kernel is made of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

from rulec.analysis.regions import ABOVE, ALL, FRACTION, ONE, SHARE, ZERO, Regions, RegionsOf
from rulec.language.expr.arithmetic import NUMPY
from rulec.language.expr.node import Kind, Node, Op, const, name, node, walk
from rulec.language.expr.static import inside
from rulec.language.hyper import Hyper

#: Operations with an infinite result at zero, of the zero's sign: a gradient of zeros has zeros of both signs.
_SIGNED = frozenset({Op.DIV, Op.RSQRT, Op.POW})

NAN, NIL, INFINITE = const(float("nan")), const(0), const(float("inf"))

#: Zero in, zero out.
_KEEPS_ZERO = (
    Op.SUM, Op.MEAN, Op.NORM, Op.RMS, Op.MIN, Op.MAX, Op.COUNT_NONZERO, Op.TRANSPOSE, Op.NEWTON_SCHULZ, Op.DIAG,
    Op.TRIU, Op.TRIL, Op.SLICE, Op.GRAM, Op.SORT,
)  # fmt: skip
_PLAIN = (Op.MEAN, Op.MIN, Op.MAX)
_NOTHING: frozenset[str] = frozenset()


class Fold:
    """Folds values with some names known.

    `conditions` collects the assumptions about hyper-parameters, such as `eps > 0`. `nan` is the first value found to
    be NaN, as it was written; None without one.
    """

    def __init__(self, known: Mapping[str, Node], regions: Mapping[str, Regions], hyper: Mapping[str, Hyper]) -> None:
        self.known: dict[Node, Node] = {name(key): value for key, value in known.items()}
        self.names, self.hyper = dict(regions), hyper
        self.regions = RegionsOf(self.names)
        self.conditions: dict[str, None] = {}
        self.nan: Node | None = None

    def fold(self, value: Node) -> Node:
        """`value` with the known names in it, simplified."""
        for part in walk([value], self.known):
            args = [self.known[a] for a in part.args]
            self.known[part] = folded = self._fold(part, args) if args else part
            if folded is NAN and NAN not in args and self.nan is None:
                self.nan = part
        return self.known[value]

    def _fold(self, value: Node, args: list[Node]) -> Node:
        op = value.op
        if op is Op.WHERE:
            return self._where(args)
        if NAN in args and (op.kind in (Kind.ARITHMETIC, Kind.REDUCE) or (op in NUMPY and not value.boolean)):
            return NAN
        if op is Op.DIV and args[1] is NIL and value.args[1].op in (Op.NORM, Op.RMS) and self._positive(args[0]):
            return INFINITE
        if op in NUMPY and all(a.op is Op.CONST for a in args):
            with np.errstate(all="ignore"):
                number = float(NUMPY[op](*(np.float64(a.arg) for a in args)))  # type: ignore[arg-type]
            if op in _SIGNED and NIL in args and abs(number) == math.inf:
                return node(op, *args, value.arg)
            return NAN if number != number else const(number)
        if inside(value).op in _KEEPS_ZERO and args[0] is NIL:
            return NIL
        if op in _PLAIN and args[0].op is Op.CONST:
            return args[0]
        if op.kind is Kind.COMPARE:
            return self._compare(op, args) or node(op, *args)
        folded = _IDENTITIES[op](self, *args) if op in _IDENTITIES else None
        return folded or node(op, *args, value.arg)

    def _where(self, args: list[Node]) -> Node:
        condition, then, otherwise = args
        if condition.op is Op.CONST:
            return then if condition.arg else otherwise
        return then if then is otherwise else node(Op.WHERE, *args)

    def _compare(self, op: Op, args: list[Node]) -> Node | None:
        """The truth of a comparison, where the regions of its operands decide it; None otherwise."""
        left, right = map(self.regions.of, args)
        if left is None or right is None:
            return None
        samples = {ZERO: 0.0, ONE: 1.0, "-": -1.0, FRACTION: 0.5, ABOVE: 2.0}
        if any(a == b and a not in (ZERO, ONE) for a in left for b in right):
            return None
        truths = {bool(NUMPY[op](samples[a], samples[b])) for a in left for b in right}
        return const(float(truths.pop())) if len(truths) == 1 else None

    def add(self, left: Node, right: Node) -> Node | None:
        if left is NIL or right is NIL:
            return right if left is NIL else left
        return _between(left, right)

    def subtract(self, left: Node, right: Node) -> Node | None:
        if left is right and self._finite(left):
            return NIL
        return left if right is NIL else node(Op.NEG, right) if left is NIL else None

    def multiply(self, left: Node, right: Node) -> Node | None:
        if NIL in (left, right) and self._finite(right if left is NIL else left):
            return NIL
        return right if left is const(1) else left if right is const(1) else None

    def product_along(self, x: Node, q: Node, _: Node) -> Node | None:
        return NIL if NIL in (x, q) and self._finite(q if x is NIL else x) else None

    def divide(self, left: Node, right: Node) -> Node | None:
        if left is NIL and self._not_zero(right):
            return NIL
        return left if right is const(1) else None

    def power(self, base: Node, exponent: Node) -> Node | None:
        if exponent is const(1):
            return base
        return NIL if base is NIL and self._positive(exponent) else None

    def least(self, left: Node, right: Node) -> Node | None:
        decided = self._compare(Op.LE, [left, right])
        return left if left is right else decided and (left if decided.arg else right)

    def greatest(self, left: Node, right: Node) -> Node | None:
        decided = self._compare(Op.GE, [left, right])
        return left if left is right else decided and (left if decided.arg else right)

    def both(self, left: Node, right: Node) -> Node | None:
        return _decided(left, right, decides=False)

    def either(self, left: Node, right: Node) -> Node | None:
        return _decided(left, right, decides=True)

    def quantile(self, x: Node, q: Node) -> Node | None:
        return x if x.op is Op.CONST and (self.regions.of(q) or ALL) <= SHARE else None

    def _positive(self, value: Node) -> bool:
        return self._holds(lambda regions: regions.is_positive(value), value)

    def _finite(self, value: Node) -> bool:
        return self._holds(lambda regions: regions.of(value) is not None, value)

    def _not_zero(self, value: Node) -> bool:
        return self._holds(lambda regions: regions.is_not_zero(value), value)

    def _holds(self, test: Callable[[RegionsOf], bool], value: Node) -> bool:
        """Whether a test holds for every value of the names, or with some hyper-parameters other than 0.

        In the second case these hyper-parameters are assumed other than 0 from now on, and added to `conditions`.
        """
        if test(self.regions):
            return True
        used = [str(n.arg) for n in walk([value]) if n.op is Op.NAME]
        optional = [
            key for key in used if key in self.hyper and ZERO in self.names.get(key, _NOTHING) and _set(self.hyper[key])
        ]
        for chosen in (*([key] for key in optional), optional):
            narrowed = {**self.names, **{key: self.names[key] - {ZERO} for key in chosen}}
            if chosen and test(RegionsOf(narrowed)):
                self.names.update(narrowed)
                self.regions = RegionsOf(self.names)
                self.conditions |= dict.fromkeys(f"{key} > 0" for key in chosen)
                return True
        return False


def _decided(left: Node, right: Node, *, decides: bool) -> Node | None:
    """The result of `and` or `or` with one side known: this side where it decides, or else the other side."""
    for known, other in ((left, right), (right, left)):
        if known.op is Op.CONST:
            return const(float(decides)) if bool(known.arg) == decides else other
    return None


def _set(hyper: Hyper) -> bool:
    """Whether a hyper-parameter is other than 0 by default."""
    return hyper.default is not None and hyper.default != 0 and hyper.min >= 0


def _between(left: Node, right: Node) -> Node | None:
    """`(1 - c)*x + c*x` is x."""
    if not (left.op is right.op is Op.MUL):
        return None
    for x in left.args:
        for other in (a for a in right.args if x in right.args and (a is not x or right.args[0] is right.args[1])):
            weight = left.args[0] if left.args[1] is x else left.args[1]
            if weight is node(Op.SUB, const(1), other) or other is node(Op.SUB, const(1), weight):
                return x
    return None


_IDENTITIES: Mapping[Op, Callable[..., Node | None]] = {
    Op.ADD: Fold.add, Op.SUB: Fold.subtract, Op.MUL: Fold.multiply, Op.DIV: Fold.divide, Op.POW: Fold.power,
    Op.MINIMUM: Fold.least, Op.MAXIMUM: Fold.greatest, Op.AND: Fold.both, Op.OR: Fold.either, Op.MATMUL: Fold.multiply,
    Op.QUANTILE: Fold.quantile,
    Op.MODE_PRODUCT: Fold.product_along,
}  # fmt: skip
