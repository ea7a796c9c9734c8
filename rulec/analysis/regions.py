"""The regions of the number line that a value may lie in: below 0, at 0, between 0 and 1, at 1, above 1.

They show `1 - beta**t` to be positive and a second moment never negative, as proofs about `g = 0` need before a
division. A set of regions covers all values possible in exact arithmetic; None stands for a value that may be NaN or
infinite.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import cast

from rulec.language.expr.node import Kind, Node, Op, const, walk
from rulec.language.expr.ops import SPECS, having
from rulec.language.expr.static import inside
from rulec.language.hyper import Hyper

NEGATIVE, ZERO, FRACTION, ONE, ABOVE = "-", "0", "f", "1", "+"
ALL = frozenset("-0f1+")
POSITIVE, NOT_NEGATIVE, TRUTH = frozenset("f1+"), frozenset("0f1+"), frozenset("01")
#: From 0 to 1.
SHARE = frozenset("0f1")
_ORDER = "-0f1+"

Regions = frozenset[str]

#: Sums and products of two regions, in the order of `_ORDER`.
_SUMS = {
    "--": "-", "-0": "-", "-f": "-0f", "-1": "-0f", "-+": "-0f1+", "00": "0", "0f": "f", "01": "1", "0+": "+",
    "ff": "f1+", "f1": "+", "f+": "+", "11": "+", "1+": "+", "++": "+",
}  # fmt: skip
_PRODUCTS = {
    "--": "f1+", "-0": "0", "-f": "-", "-1": "-", "-+": "-", "00": "0", "0f": "0", "01": "0", "0+": "0",
    "ff": "f", "f1": "f", "f+": "f1+", "11": "1", "1+": "+", "++": "+",
}  # fmt: skip
#: `1 - x`, `x - 1` and `1/x` by the region of x.
_ONE_LESS = {"-": "+", "0": "1", "f": "f", "1": "0", "+": "-"}
_LESS_ONE = {"-": "-", "0": "-", "f": "-", "1": "0", "+": "f1+"}
_NEGATED = cast("Mapping[str, str]", SPECS[Op.NEG].regions)
_INVERSE = {"-": "-", "f": "+", "1": "1", "+": "f"}
#: The images of regions under functions of one number; a region without one may be NaN.
_FUNCTIONS: Mapping[Op, Mapping[str, str]] = having("regions")
_OF_SIZES = having("of_sizes")
_BASES = {
    "f": {"-": "+", "0": "1", "f": "f", "1": "f", "+": "f"},
    "1": dict.fromkeys("-0f1+", "1"),
    "+": {"-": "f", "0": "1", "f": "+", "1": "+", "+": "+"},
    "0": {"0": "1", "f": "0", "1": "0", "+": "0"},
}


def region(number: float) -> Regions:
    """The region of a finite number."""
    return frozenset(
        NEGATIVE if number < 0 else ZERO if number == 0 else FRACTION if number < 1 else ONE if number == 1 else ABOVE
    )


def range_of(hyper: Hyper) -> Regions:
    """The regions with a number in a hyper-parameter's range."""
    low, high = max(hyper.min, hyper.above), min(hyper.max, hyper.below)
    inside = {x for x in (0.0, 1.0) if _within(hyper, x)}
    met = {region(x) for x in inside}
    for name, start, end in ((NEGATIVE, float("-inf"), 0.0), (FRACTION, 0.0, 1.0), (ABOVE, 1.0, float("inf"))):
        if max(low, start) < min(high, end) or (low == high and start < low < end):
            met.add(frozenset(name))
    return frozenset().union(*met)


def _within(hyper: Hyper, x: float) -> bool:
    return hyper.min <= x <= hyper.max and hyper.above < x < hyper.below


class RegionsOf:
    """Computes the regions of values from those of names, each value once."""

    def __init__(self, names: Mapping[str, Regions]) -> None:
        self.names = names
        self.known: dict[Node, Regions | None] = {}

    def of(self, value: Node) -> Regions | None:
        """The regions of `value`; None where it may be NaN or infinite."""
        for part in walk([value], self.known):
            args = [self.known[a] for a in part.args]
            known = cast("list[Regions]", args)
            if None not in args and _is_squared(part):
                known = [cast(Regions, self.known[part.args[0].args[0]]), _square(known[1])]
            self.known[part] = self._leaf(part) if not args else None if None in args else _regions(part, known)
        return self.known[value]

    def is_positive(self, value: Node) -> bool:
        """Whether the value is above 0 for all values of the names."""
        return (self.of(value) or ALL) <= POSITIVE

    def is_not_zero(self, value: Node) -> bool:
        """Whether the value is finite and not 0 for all values of the names."""
        regions = self.of(value)
        return regions is not None and ZERO not in regions

    def _leaf(self, value: Node) -> Regions | None:
        if value.op is Op.CONST:
            number = cast(float, value.arg)
            return region(number) if number - number == 0 else None
        return self.names.get(str(value.arg), ALL)


def _each(table: Mapping[str, str], regions: Iterable[str]) -> Regions | None:
    """The images of regions under a table; None where one of them is not in it."""
    images = [table.get(r) for r in regions]
    return None if None in images else frozenset("".join(cast("list[str]", images)))


def _pairs(table: Mapping[str, str], left: Regions, right: Regions) -> Regions:
    pairs = ("".join(sorted(pair, key=_ORDER.index)) for pair in itertools.product(left, right))
    return frozenset("".join(table[pair] for pair in pairs))


def _regions(value: Node, args: list[Regions]) -> Regions | None:
    op, first = inside(value).op, args[0]
    if op.kind in (Kind.COMPARE, Kind.LOGIC) or op in (Op.ISFINITE, Op.COUNT_NONZERO):
        return TRUTH if op is not Op.COUNT_NONZERO else NOT_NEGATIVE
    if op in _FUNCTIONS:
        return _each(_FUNCTIONS[op], first)
    if op.kind is Kind.REDUCE:
        return _reduced(op, first)
    if op in _OF_SIZES:
        zero = frozenset(ZERO)
        return zero if all(x == zero for x in args) else NOT_NEGATIVE if all(ZERO in x for x in args) else POSITIVE
    return _BINARY[op](value, args) if op in _BINARY else ALL


def _reduced(op: Op, x: Regions) -> Regions:
    if op in (Op.NORM, Op.RMS):
        return frozenset(ZERO) if x == {ZERO} else NOT_NEGATIVE if ZERO in x else POSITIVE
    if op in (Op.MIN, Op.MAX):
        return x
    if x <= NOT_NEGATIVE:
        return frozenset(ZERO) if x == {ZERO} else NOT_NEGATIVE if ZERO in x else POSITIVE
    return ALL if x != {NEGATIVE} else x


def _difference(value: Node, args: list[Regions]) -> Regions | None:
    if value.args[0] is value.args[1]:
        return frozenset(ZERO)
    if value.args[0] is const(1):
        return _each(_ONE_LESS, args[1])
    if value.args[1] is const(1):
        return _each(_LESS_ONE, args[0])
    return _pairs(_SUMS, args[0], cast(Regions, _each(_NEGATED, args[1])))


def _is_squared(value: Node) -> bool:
    """Whether a value is `c*x*x`: it has the sign of `c`, or is 0, though its factor `c*x` may have any sign."""
    return value.op is Op.MUL and value.args[0].op is Op.MUL and value.args[0].args[1] is value.args[1]


def _square(x: Regions) -> Regions:
    return frozenset().union(*(_PRODUCTS[r + r] for r in x))


def _product(value: Node, args: list[Regions]) -> Regions:
    if value.args[0] is value.args[1]:
        return _square(args[0])
    return _pairs(_PRODUCTS, args[0], args[1])


def _quotient(value: Node, args: list[Regions]) -> Regions | None:
    inverse = _each(_INVERSE, args[1])
    return inverse and _pairs(_PRODUCTS, args[0], inverse)


def _raised(value: Node, args: list[Regions]) -> Regions | None:
    base, exponent = args
    if NEGATIVE not in base:
        powers = [_BASES[b].get(e) for b, e in itertools.product(base, exponent)]
        return None if None in powers else frozenset("".join(cast("list[str]", powers)))
    power = value.args[1].arg if value.args[1].op is Op.CONST else None
    if power in (2.0, 4.0, 6.0):
        return NOT_NEGATIVE if ZERO in base else POSITIVE
    return ALL if power in (1.0, 3.0, 5.0) else None


def _extreme(value: Node, args: list[Regions]) -> Regions:
    pick: Callable[..., int] = max if value.op is Op.MAXIMUM else min
    return frozenset(_ORDER[pick(map(_ORDER.index, pair))] for pair in itertools.product(*args))


_BINARY: Mapping[Op, Callable[[Node, list[Regions]], Regions | None]] = {
    Op.ADD: lambda _, args: _pairs(_SUMS, args[0], args[1]),
    Op.SUB: _difference, Op.MUL: _product, Op.DIV: _quotient, Op.POW: _raised,
    Op.MINIMUM: _extreme, Op.MAXIMUM: _extreme,
    Op.WHERE: lambda _, args: args[1] | args[2],
    Op.MOD: lambda _, args: NOT_NEGATIVE if args[1] <= POSITIVE else None,
    Op.FLOORDIV: lambda _, args: ALL if ZERO not in args[1] else None,
    Op.MATMUL: lambda _, args: ALL, Op.INVERSE_ROOT: lambda _, args: None,
    Op.SOLVE: lambda _, args: None, Op.CHOLESKY: lambda _, args: None, Op.TOPK: lambda *_: TRUTH,
    Op.SORT: lambda _, args: args[0], Op.ARGSORT: lambda *_: frozenset("01+"), Op.TAKE: lambda *_: None,
    Op.QUANTILE: lambda _, args: _reduced(Op.MEAN, args[0]) if args[1] <= SHARE else None,
}  # fmt: skip
