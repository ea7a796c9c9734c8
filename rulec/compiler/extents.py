"""Extents compared with static hyper-parameters as numbers: `3*cols/blocks` is `cols` where `blocks` is 3.

An extent is a sum of multiples of terms; a term is a shape fact, or another function of shape facts. The numbers are
fractions, so that thirds of an extent make it whole again.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from fractions import Fraction

from rulec.language.expr.arithmetic import number_known
from rulec.language.expr.node import Node, Op, const, node, walk
from rulec.language.expr.text import expression_text

#: The multiples of terms in an extent; the number without a term is that of `None`.
Multiples = dict[Node | None, Fraction]

#: Functions with one result for operands in any order.
_UNORDERED = (Op.MINIMUM, Op.MAXIMUM)


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
        if value.op is Op.MUL:
            return _product(*args)
        if value.op is Op.DIV and args[1]:
            return _quotient(args[0], args[1])
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


def _factors(term: Node | None) -> list[Node]:
    """The factors of a term, in the order of their text; none for a number."""
    if term is None:
        return []
    return [*_factors(term.args[0]), *_factors(term.args[1])] if term.op is Op.MUL else [term]


def _times(factors: Iterable[Node]) -> Node | None:
    """The term with these factors, where a factor and its inverse cancel; None where no factor is left."""
    left: list[Node] = []
    for factor in factors:
        inverse = _inverse(factor)
        if inverse in left:
            left.remove(inverse)
        else:
            left.append(factor)
    total: Node | None = None
    for factor in sorted(left, key=expression_text):
        total = factor if total is None else node(Op.MUL, total, factor)
    return total


def _inverse(factor: Node) -> Node:
    """One over a factor."""
    is_inverse = factor.op is Op.DIV and factor.args[0] is const(1)
    return factor.args[1] if is_inverse else node(Op.DIV, const(1), factor)


def _product(left: Multiples, right: Multiples) -> Multiples:
    """The product, term by term; a sum that all terms of the other side are divided by cancels."""
    for sum_, other in ((left, right), (right, left)):
        inverse = _inverse(_written(sum_)) if len(sum_) > 1 else None
        if inverse and other and all(inverse in _factors(term) for term in other):
            return {_times([*_factors(term), _written(sum_)]): count for term, count in other.items()}
    total: Multiples = {}
    for (a, times), (b, more) in itertools.product(left.items(), right.items()):
        term = _times([*_factors(a), *_factors(b)])
        total[term] = total.get(term, Fraction(0)) + times * more
    return total


def _quotient(left: Multiples, right: Multiples) -> Multiples:
    """The quotient by a sum: by its one term, or by the sum as a term of its own."""
    (term, times), *others = right.items()
    if others:
        term, times = _written(right), Fraction(1)
    return _product(left, {_times(map(_inverse, _factors(term))): 1 / times})


def _written(multiples: Multiples) -> Node:
    """One expression of multiples of terms: its terms are in the order of their text."""
    total: Node | None = None
    for term, count in sorted(multiples.items(), key=lambda item: "" if item[0] is None else expression_text(item[0])):
        above, below = const(float(count.numerator)), const(float(count.denominator))
        part = above if term is None else node(Op.MUL, above, term)
        part = part if count.denominator == 1 else node(Op.DIV, part, below)
        total = part if total is None else node(Op.ADD, total, part)
    return const(0) if total is None else total
