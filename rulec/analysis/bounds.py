"""Bounds of values: the least and the greatest number that an expression may be, whatever the gradients are.

A bound holds for every result that is a number: NaN is outside of it, and infinities are inside. So a bound needs no
proof that a divisor is not zero, unlike the regions of `rulec.analysis.regions`. A divisor at least 0 is never -0.

Products are seen as their factors, and clips are recognised. Two kinds of sums, `Toward` and `SignedStep`, have a sign
that their terms alone do not show.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import cast

from rulec.language.expr.node import Kind, Node, Op, walk
from rulec.language.expr.ops import ANY, INFINITE, POSITIVE, UNIT, Bound, having, hull, negative, size
from rulec.language.hyper import Hyper

_FACTS: Mapping[str, Bound] = {
    "t": (1.0, INFINITE), "rows": (1.0, INFINITE), "cols": (1.0, INFINITE), "numel": (1.0, INFINITE),
    "ndim": POSITIVE, "machine_eps": UNIT, "tensor": POSITIVE, "tensors": (1.0, INFINITE),
    "depth": (-1.0, INFINITE), "depths": (1.0, INFINITE),
}  # fmt: skip


def names_bounds(hyper: Mapping[str, Hyper]) -> dict[str, Bound]:
    """The bounds of hyper-parameters, by their ranges, of `t` and of shape facts. Other names may be any number."""
    ranges = {key: (max(h.min, h.above), min(h.max, h.below)) for key, h in hyper.items()}
    return {**_FACTS, **ranges}


class Bounds:
    """Computes the bounds of values from those of names, each value once."""

    def __init__(self, names: Mapping[str, Bound]) -> None:
        self.names = names
        self.known: dict[Node, Bound] = {}

    def of(self, value: Node) -> Bound:
        """The bound of `value`."""
        for part in walk([value], self.known):
            self.known[part] = self._bound(part)
        return self.known[value]

    def not_negative(self, value: Node) -> bool:
        """Whether the value is never below 0."""
        return self.of(value)[0] >= 0

    def not_positive(self, value: Node) -> bool:
        """Whether the value is never above 0."""
        return self.of(value)[1] <= 0

    def is_fraction(self, part: Iterable[Factor]) -> bool:
        """Whether the product of some factors is always from 0 to 1."""
        low, high = self._product(part)
        return low >= 0 and high <= 1

    def _bound(self, value: Node) -> Bound:
        op, args = value.op, [self.known[a] for a in value.args]
        if op is Op.CONST:
            number = cast(float, value.arg)
            return (number, number) if number == number else ANY
        if not args:
            return UNIT if op is Op.UNIFORM else self.names.get(str(value.arg), ANY)
        if op in (Op.MUL, Op.DIV) or (op is Op.POW and whole_power(value) in (2, 4, 6, 8)):
            return self._product(factors(value).elements())
        if op in (Op.ADD, Op.SUB):
            return self._sum(value, args)
        if op.kind is Kind.REDUCE:
            return _reduced(op, args[0])
        return _FUNCTIONS[op](*args) if op in _FUNCTIONS else ANY

    def _product(self, parts: Iterable[Factor]) -> Bound:
        result: Bound = (1.0, 1.0)
        for (part, below), count in Counter(parts).items():
            bound = self.of(part)
            if below:
                bound = _inverse(bound)
            for _ in range(count // 2):
                result = _times(result, _squared(bound))
            result = _times(result, bound) if count % 2 else result
        return result

    def _sum(self, value: Node, args: list[Bound]) -> Bound:
        step = toward(value)
        if step is not None and self.is_fraction(step.weights):
            return hull(self.of(step.base), self.of(step.target))
        plain = _plus(args[0], args[1] if value.op is Op.ADD else negative(args[1]))
        return (max(plain[0], 0.0), plain[1]) if self._signed_step_stays(value) else plain

    def _signed_step_stays(self, value: Node) -> bool:
        """Whether a step by a sign never leads below 0: down it goes no further than the base is above the target."""
        step = signed_step(value)
        if step is None or step.rest is None or not self.is_fraction(step.rest):
            return False
        return self.not_negative(step.base) and self.not_negative(step.target)


def _finite(value: float, instead: float) -> float:
    return instead if value != value else value


def _plus(a: Bound, b: Bound) -> Bound:
    return _finite(a[0] + b[0], -INFINITE), _finite(a[1] + b[1], INFINITE)


def _times(a: Bound, b: Bound) -> Bound:
    # Zero times infinity is NaN, which is outside of bounds, and between them lie numbers of any size from zero on.
    corners = [_finite(x * y, 0.0) for x in a for y in b]
    return min(corners), max(corners)


def _squared(a: Bound) -> Bound:
    sizes = size(a)
    return sizes[0] * sizes[0], sizes[1] * sizes[1]


def _inverse(a: Bound) -> Bound:
    if a[0] >= 0:
        return (0.0 if a[1] == INFINITE else 1 / a[1] if a[1] else INFINITE), 1 / a[0] if a[0] else INFINITE
    return (-INFINITE, 0.0) if a[1] < 0 else ANY


def _reduced(op: Op, a: Bound) -> Bound:
    if op in (Op.NORM, Op.RMS, Op.COUNT_NONZERO):
        return POSITIVE
    if op is Op.SUM:
        return (0.0 if a[0] >= 0 else -INFINITE), (0.0 if a[1] <= 0 else INFINITE)
    return a


#: Operation -> the bound of its result: those of the records, and of matrices and random numbers.
_FUNCTIONS: Mapping[Op, Callable[..., Bound]] = {
    **having("bounds"), Op.TRANSPOSE: lambda a: a, Op.UNIFORM: lambda *_: UNIT, Op.TOPK: lambda *_: UNIT,
    Op.QUANTILE: lambda a, _: a, Op.SORT: lambda a: a, Op.TAKE: lambda a, _: a, Op.ARGSORT: lambda _: POSITIVE,
}  # fmt: skip


#: A factor, and whether the product is divided by it.
Factor = tuple[Node, bool]

#: Highest whole power to write as factors.
_POWER = 8

#: Most times that a product is taken apart within one value: squares of squares have twice as many factors each time.
_MOST = 64


def factors(value: Node) -> Counter[Factor]:
    """The factors of a product, each with its count: of `c*x*x/y`, c once, x twice, and y once as a divisor.

    A product that stands in the value more than `_MOST` times is a factor itself.
    """
    counts: Counter[Factor] = Counter()
    inside: Counter[Factor] = Counter({(value, False): 1})
    # A product's count is whole once all values that it stands in have been taken apart.
    for part in reversed([*_product_parts(value)]):
        for below in (False, True):
            count = inside[part, below]
            if not count:
                continue
            power = whole_power(part)
            if part.op in (Op.MUL, Op.DIV) and count <= _MOST:
                inside[part.args[0], below] += count
                inside[part.args[1], below if part.op is Op.MUL else not below] += count
            elif power is not None and 0 < power <= _POWER:
                counts[part.args[0], below] += power * count
            else:
                counts[part, below] += count
    return counts


def _product_parts(value: Node) -> Iterator[Node]:
    """The products in a product and their factors, each once, operands first."""
    seen: set[Node] = set()
    stack = [(value, False)]
    while stack:
        part, expanded = stack.pop()
        if part in seen:
            continue
        if expanded or part.op not in (Op.MUL, Op.DIV):
            seen.add(part)
            yield part
        else:
            stack += [(part, True), *((a, False) for a in part.args)]


def whole_power(value: Node) -> int | None:
    """The exponent of a power with a constant whole exponent; None for any other value."""
    exponent = value.args[1].arg if value.op is Op.POW and value.args[1].op is Op.CONST else None
    return int(exponent) if isinstance(exponent, float) and exponent.is_integer() else None


@dataclass(frozen=True)
class Toward:
    """A step of `base` by a part of the way to `target`: `base + weights*(target - base)`."""

    base: Node
    target: Node
    weights: tuple[Factor, ...]


@dataclass(frozen=True)
class SignedStep:
    """A step of `base` towards `target` by `length`: `base + sign(target - base)*length`.

    `rest` has the factors of `length` that are left without those of `target`, None where `target` is no part of it.
    """

    base: Node
    target: Node
    length: tuple[Factor, ...]
    rest: tuple[Factor, ...] | None


def clipped(value: Node) -> tuple[Node, Node, Node] | None:
    """The value within `maximum(minimum(value, high), low)`, or the reverse, and its two bounds; None for all else."""
    other = {Op.MAXIMUM: Op.MINIMUM, Op.MINIMUM: Op.MAXIMUM}.get(value.op)
    inner = value.args[0] if other is not None else None
    return (*inner.args, value.args[1]) if inner is not None and inner.op is other else None  # type: ignore[return-value]


def toward(value: Node) -> Toward | None:
    """A sum as a step of a part of the way; None for any other value."""
    for base, counts, forward in _moves(value):
        for (part, below), count in counts.items():
            if part.op is Op.SUB and count == 1 and not below:
                target, start = part.args if forward else part.args[::-1]
                if start is base:
                    return Toward(base, target, tuple((counts - Counter({(part, below): 1})).elements()))
    return None


def signed_step(value: Node) -> SignedStep | None:
    """A sum as a step whose direction is a sign; None for any other value."""
    for base, counts, forward in _moves(value):
        for (part, below), count in counts.items():
            if part.op is Op.SIGN and count == 1 and not below and part.args[0].op is Op.SUB:
                target, start = part.args[0].args if forward else part.args[0].args[::-1]
                if start is base:
                    length = counts - Counter({(part, below): 1})
                    inside = factors(target)
                    rest = tuple((length - inside).elements()) if inside <= length else None
                    return SignedStep(base, target, tuple(length.elements()), rest)
    return None


def _moves(value: Node) -> Iterator[tuple[Node, Counter[Factor], bool]]:
    """The ways to read a sum as a base and a product: the factors, and whether the product is added."""
    if value.op in (Op.ADD, Op.SUB):
        yield value.args[0], factors(value.args[1]), value.op is Op.ADD
    if value.op is Op.ADD:
        yield value.args[1], factors(value.args[0]), True
