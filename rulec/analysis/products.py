"""Products as their factors; clips; two kinds of sums that have a sign their terms alone do not show."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from rulec.language.expr.node import Node, Op

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
