"""Counts in expressions: iterations, rows, columns and vectors; and the levels of reductions and states.

Levels are words, or `axis(i)` and `block(n)` with a number.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

from rulec.language.expr.arithmetic import number_known
from rulec.language.expr.node import LEVELS, PLACED, Node, Op, const, node, walk
from rulec.language.expr.static import ALONG, STATIC, is_lowered, letters_of, settings, statics
from rulec.language.expr.text import expression_text, short_text
from rulec.language.source import Span

#: Most steps of an iteration.
MAX_STEPS = 100

#: Functions by which an author bounds a number: `minimum(rank, rows)`.
_CHOICES = (Op.MINIMUM, Op.MAXIMUM, Op.WHERE)

#: Most elements of anything: at a byte each, twice what a processor of 64 bits lets a program address.
MAX_ELEMENTS = 1 << 48


@dataclass(frozen=True)
class Count:
    """Values that must be whole numbers: the extents of an array, or the steps of an iteration.

    Each of `values` lies between `least` and `most`, and their product is at most MAX_ELEMENTS. `what` names the
    count in messages. A `fixed` count does not change from step to step. If `bounded`, a value with a
    hyper-parameter in it lies between 1 and the shorter side of the matrix, or is 1 or more where the author bounds the
    hyper-parameter, as in `minimum(rank, rows)`. For a slice, `end` is the operation, and `limit` the extent that its
    last bound must not exceed. For a function of blocks, blocks must divide the `limit`. A place of `take` is below it.
    `text` is the author's expression of the operation.
    """

    what: str
    values: tuple[Node, ...]
    least: int = 0
    most: int = MAX_ELEMENTS
    fixed: bool = True
    bounded: bool = False
    span: Span | None = None
    end: Node | None = None
    limit: Node | None = None
    text: Node | None = None

    def written(self, span: Span | None, text: Node) -> Count:
        """The same count at the author's line, with the author's expression in its messages."""
        if self.end is None:
            return replace(self, span=span)
        what = self.what.replace(repr(short_text(self.end)), repr(short_text(text)))
        return replace(self, span=span, what=what, text=text)

    def problem(self, known: Mapping[str, float]) -> str:
        """Why these values are not allowed, as a sentence; empty where they are, and where they are not known yet.

        `known` has values of hyper-parameters and of shape facts.
        """
        numbers = [number_known(value, known) for value in self.values]
        for value, number in zip(self.values, numbers, strict=True):
            least, most = self._range(value, known)
            if number is not None and not is_count(number, least, most):
                text = f"{number:g}" if value.op is Op.CONST else f"{expression_text(value)} = {number:g}"
                empty = most == 0 or 0 in (known.get("rows"), known.get("cols"))
                advice = ": leave a tensor without elements out" if empty else _advice(value)
                return f"{count_problem(self.what, text, least, most)}{_matrix(known)}{advice}"
        if self.end is not None:
            return self._past_end(max((n for n in numbers if n is not None), default=0), known)
        size = math.prod(n for n in numbers if n is not None)
        if None in numbers or size <= MAX_ELEMENTS:
            return ""
        sides = " by ".join(f"{n:g}" for n in numbers)
        return f"{self.what} is too large: {sides} elements{_matrix(known)} are more than any memory holds"

    def _past_end(self, last: float, known: Mapping[str, float]) -> str:
        """Why a slice with this last bound does not fit; empty where it does, and where the extent is not known."""
        most = None if self.limit is None else number_known(self.limit, known)
        if self.end is not None and self.end.op is Op.IN_BLOCKS:
            return self._cut_unevenly(last, most, known)
        if self.end is not None and self.end.op is Op.TAKE and most is not None and last >= most:
            where = short_text(self.text or self.end)
            count = f"{last:g} of {most:g}{_matrix(known)}"
            return f"{where!r} takes place {count}, and places count from 0: choose one that all tensors have"
        if self.end is None or most is None or last <= most:
            return ""
        sides = settings(self.end).get("axis", "rows")
        advice = _advice(node(Op.ADD, self.values[0], self.values[-1]))
        return f"{short_text(self.text or self.end)!r} ends at {last:g} of {most:g} {sides}{_matrix(known)}{advice}"

    def _cut_unevenly(self, size: float, most: float | None, known: Mapping[str, float]) -> str:
        """Why blocks of `size` rows do not fit; empty where they do, and where the extent is not known."""
        if most is None or not size or most % size == 0:
            return ""
        where, advice = short_text(self.text or cast(Node, self.end)), _advice(self.values[0])
        advice = advice or ": say under applies_to which tensors they divide"
        return f"blocks of {size:g} rows do not divide the {most:g} rows in {where!r}{_matrix(known)}{advice}"

    def _range(self, value: Node, known: Mapping[str, float]) -> tuple[int, int]:
        parts = [*walk([value])] if self.bounded and "rows" in known else []
        if not any(n.op is Op.HYPER for n in parts):
            return self.least, self.most
        free = walk([value], {n for n in parts if n.op in _CHOICES})
        return 1, int(min(known["rows"], known["cols"])) if any(n.op is Op.HYPER for n in free) else self.most


def _matrix(known: Mapping[str, float]) -> str:
    return f" for a matrix of {known['rows']:g} by {known['cols']:g}" if "rows" in known else ""


def _advice(value: Node) -> str:
    leaves = [n for n in walk([value]) if n.op in (Op.FACT, Op.HYPER)]
    chosen = [str(n.arg) for n in leaves if n.op is Op.HYPER]
    if chosen:
        return f": choose another {chosen[0]}"
    return ": say under applies_to for which tensors it is one" if leaves else ""


def is_count(number: float, least: int, most: int) -> bool:
    """Whether a number is whole and in a range. `most=MAX_ELEMENTS` stands for a range without an upper end."""
    return float(number).is_integer() and least <= number and (number <= most or most == MAX_ELEMENTS)


def count_problem(what: str, text: str, least: int, most: int) -> str:
    """The sentence for a number (as `text`) that is no whole number in a range."""
    end = f" to {most}" if most < MAX_ELEMENTS else ""
    return f"{what} must be a whole number from {least}{end}, not {text}"


def count_of(value: Node) -> Count | None:
    """The count in an operation, such as the rank of `singular_vectors`; None for an operation without one."""
    if value.op is Op.NEWTON_SCHULZ:
        return Count("the number of steps of newton_schulz", value.args[1:], 0, MAX_STEPS, fixed=False)
    if value.op is Op.SINGULAR_VECTORS:
        return Count("the rank of singular_vectors", statics(value), 1)
    if value.op is Op.SLICE:
        start, stop = statics(value)
        bounds = (start,) if stop is const(math.inf) else (start, stop, difference(stop, start))
        return Count(f"a bound or the extent of {short_text(value)!r}", bounds, end=value)
    if value.op is Op.TAKE:
        constant = number_known(value.args[1], {}) is not None
        return Count(f"the place in {short_text(value)!r}", value.args[1:], 0, end=value) if constant else None
    if value.op is Op.IN_BLOCKS:
        return Count(f"the size of a block in {short_text(value)!r}", statics(value), 1, end=value)
    if value.op is Op.INDEX:
        sides = value.args if value.arg else ()
        if is_lowered(value):
            sides = statics(value)[: len(letters_of(settings(value)["template"]))]
        return Count("an extent of index", sides) if sides else None
    if value.op not in STATIC or value.op in ALONG:
        return None
    return Count(f"an extent of {value.op.symbol}", statics(value))


def difference(stop: Node, start: Node) -> Node:
    """The extent `stop - start`, in the form of `simplified`."""
    return simplified(node(Op.SUB, stop, start))


def simplified(extent: Node) -> Node:
    """An extent as the sum of its terms, in their order, each once: `k + (cols - k)` is `cols`.

    Extents are the same where their nodes are.
    """
    terms = _terms(extent)
    number = terms.pop(const(1), 0.0)
    total: Node | None = None
    for term, count in sorted(terms.items(), key=lambda item: item[1] < 0):
        if count:
            size = term if abs(count) == 1 else node(Op.MUL, const(abs(count)), term)
            sign = Op.ADD if count > 0 else Op.SUB
            total = size if total is None and count > 0 else node(sign, total or const(0), size)
    if total is None or number == 0:
        return const(number) if total is None else total
    return node(Op.ADD if number > 0 else Op.SUB, total, const(abs(number)))


def _terms(extent: Node) -> dict[Node, float]:
    """The terms of a sum in their order, each with its count; that of 1 is the sum of its numbers."""
    counts: dict[Node, float] = {extent: 1.0}
    terms: dict[Node, float] = {}
    # A sum is counted once all values that it stands in are taken apart.
    for part in reversed([*walk([extent])]):
        if part in counts and part.op in (Op.ADD, Op.SUB):
            left, right = part.args
            counts[left] = counts.get(left, 0.0) + counts[part]
            counts[right] = counts.get(right, 0.0) + counts[part] * (1 if part.op is Op.ADD else -1)
    for part in walk([extent]):
        if part in counts and part.op not in (Op.ADD, Op.SUB):
            term, size = (const(1), cast(float, part.arg)) if part.op is Op.CONST else (part, 1.0)
            terms[term] = terms.get(term, 0.0) + counts[part] * size
    return terms


#: A call of each level with a number, as messages show it.
SIGNATURES: Mapping[str, str] = {"axis": "axis(0)", "block": "block(64)"}


@dataclass(frozen=True)
class Level:
    """`axis(number)` or `block(number)`: the level of one value for each index of an axis, or for each block.

    `trace` is as in `rulec.language.tracing.value.Value`.
    """

    word: str
    number: Node
    trace: Any = field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        return level_text(self.word, self.number)


def level_text(word: str, number: Node | None) -> str:
    """A level as it is written in a rule: `row`, or `axis(0)`."""
    return word if number is None else f"{word}({expression_text(number)})"


def reduction(op: Op, x: Node, per: str | Level) -> Node:
    """The reduction of `x` to a level."""
    return node(op, x, per.number, per.word) if isinstance(per, Level) else node(op, x, per)


def bare_problem(word: str) -> str:
    """Why a level cannot stand without its number, as a sentence; empty where it can."""
    return f"{word} is a level with a number: write {SIGNATURES[word]}" if word in PLACED else ""


def levels_text() -> str:
    """All levels, as messages list them."""
    return ", ".join([*LEVELS, *SIGNATURES.values()])
