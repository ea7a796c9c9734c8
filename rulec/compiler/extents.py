"""Extents compared with static hyper-parameters as numbers: `3*cols/blocks` is `cols` where `blocks` is 3.

An extent is a sum of multiples of terms; a term is a shape fact, or another function of shape facts. The numbers are
fractions, so that thirds of an extent make it whole again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fractions import Fraction

from rulec.language.expr.arithmetic import number_known
from rulec.language.expr.node import Node, Op, const, node, walk
from rulec.language.expr.text import expression_text

#: The multiples of terms in an extent; the number without a term is that of `None`.
Multiples = dict[Node | None, Fraction]

#: Functions with one result for operands in any order.
_UNORDERED = (Op.MINIMUM, Op.MAXIMUM, Op.MUL)


class Extents:
    """One node for each extent: the first of all expressions of it.

    `static` has the values of static hyper-parameters.
    """

    def __init__(self, static: Mapping[str, float], first: Iterable[Node]) -> None:
        self.static = static
        self.known: dict[Node, Multiples] = {}
        self.chosen: dict[frozenset[tuple[Node | None, Fraction]], Node] = {}
        for extent in first:
            self.one(extent)

    def one(self, extent: Node) -> Node:
        """The node of an extent."""
        return self.chosen.setdefault(frozenset(self.multiples(extent).items()), extent)

    def multiples(self, extent: Node) -> Multiples:
        """The extent as multiples of terms, without those of 0."""
        for part in walk([extent], self.known):
            multiples = self._multiples(part, [self.known[a] for a in part.args])
            self.known[part] = {term: count for term, count in multiples.items() if count}
        return self.known[extent]

    def _multiples(self, value: Node, args: list[Multiples]) -> Multiples:
        if value.op in (Op.ADD, Op.SUB):
            return _sum(args[0], args[1], 1 if value.op is Op.ADD else -1)
        if value.op is Op.NEG:
            return _sum({}, args[0], -1)
        if value.op is Op.MUL and any(map(_is_number, args)):
            number_at = 0 if _is_number(args[0]) else 1
            return _sum({}, args[1 - number_at], args[number_at].get(None, Fraction(0)))
        if value.op is Op.DIV and _is_number(args[1]) and args[1]:
            return _sum({}, args[0], 1 / args[1][None])
        number = number_known(value, self.static) if all(map(_is_number, args)) else None
        if number is not None and number - number == 0:
            return {None: Fraction(number)}
        return {self._term(value, args): Fraction(1)}

    def _term(self, value: Node, args: list[Multiples]) -> Node:
        """A term whose operands are written in one way."""
        if not args:
            return value
        operands = [_written(each) for each in args]
        if value.op in _UNORDERED:
            operands.sort(key=expression_text)
        return node(value.op, *operands, value.arg)


def _is_number(multiples: Multiples) -> bool:
    return not multiples.keys() - {None}


def _sum(left: Multiples, right: Multiples, times: Fraction | int) -> Multiples:
    total = dict(left)
    for term, count in right.items():
        total[term] = total.get(term, Fraction(0)) + times * count
    return total


def _written(multiples: Multiples) -> Node:
    """One expression of multiples of terms: its terms are in the order of their text."""
    total: Node | None = None
    for term, count in sorted(multiples.items(), key=lambda item: "" if item[0] is None else expression_text(item[0])):
        above, below = const(float(count.numerator)), const(float(count.denominator))
        part = above if term is None else node(Op.MUL, above, term)
        part = part if count.denominator == 1 else node(Op.DIV, part, below)
        total = part if total is None else node(Op.ADD, total, part)
    return const(0) if total is None else total
