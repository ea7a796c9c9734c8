"""Numbers that count: how often an iteration runs, and how many rows, columns and vectors something has."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rulec.language.arithmetic import number_known
from rulec.language.node import Kind, Node, Op, walk
from rulec.language.source import Span
from rulec.language.text import expression_text

#: Most steps of an iteration.
MAX_STEPS = 100

#: Most elements of anything: at a byte each, twice what a processor of 64 bits lets a program address.
MAX_ELEMENTS = 1 << 48


@dataclass(frozen=True)
class Count:
    """Values that must be whole numbers: the extents of an array, or the steps of an iteration.

    Each of `values` lies between `least` and `most`, and their product is at most MAX_ELEMENTS. `what` names the
    count in messages. A `fixed` count does not change from step to step. Where `bounded`, a value with a
    hyper-parameter in it lies between 1 and the shorter side of the matrix.
    """

    what: str
    values: tuple[Node, ...]
    least: int = 0
    most: int = MAX_ELEMENTS
    fixed: bool = True
    bounded: bool = False
    span: Span | None = None

    def problem(self, known: Mapping[str, float]) -> str:
        """Why these values are not allowed, as a sentence; empty where they are, and where they are not known yet.

        `known` has values of hyper-parameters and of shape facts.
        """
        numbers = [number_known(value, known) for value in self.values]
        for value, number in zip(self.values, numbers, strict=True):
            least, most = self._range(value, known)
            if number is not None and not is_count(number, least, most):
                text = f"{number:g}" if value.op is Op.CONST else f"{expression_text(value)} = {number:g}"
                advice = _advice(value) if most else ": leave a tensor without elements out"
                return f"{count_problem(self.what, text, least, most)}{_matrix(known)}{advice}"
        size = math.prod(n for n in numbers if n is not None)
        if None in numbers or size <= MAX_ELEMENTS:
            return ""
        sides = " by ".join(f"{n:g}" for n in numbers)
        return f"{self.what} is too large: {sides} elements{_matrix(known)} are more than any memory holds"

    def _range(self, value: Node, known: Mapping[str, float]) -> tuple[int, int]:
        if self.bounded and "rows" in known and any(n.op is Op.HYPER for n in walk([value])):
            return 1, int(min(known["rows"], known["cols"]))
        return self.least, self.most


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
        return Count("the rank of singular_vectors", value.args[1:], 1)
    if value.op.kind is not Kind.RANDOM:
        return None
    extents: Sequence[Node] = value.args[1:] or value.arg[1:]  # type: ignore[index]
    return Count(f"an extent of {value.op.symbol}", tuple(extents))
