"""The order of the values of a gap, in which vectors with one operation come one after the other, as a round.

A round is computed in one call on a device. The rows and columns of Adafactor take the same steps, so most rounds have
two values. Values of matrices stay at their places: in another order they would be in memory for longer.
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterator, Mapping, Sequence

from rulec.language.expr.node import Kind, Node
from rulec.runtime.buckets.flat import ROUNDS, WITH_NUMBERS


def in_rounds(values: Sequence[Node], in_flat: Mapping[Node, str | None], fixed: Container[Node]) -> tuple[Node, ...]:
    """The values of a gap in the order of their rounds, each after its operands.

    `in_flat` has the axes of vectors, as `axes_in_flat` gives them. Matrices and the values in `fixed` keep their
    places: what comes before one of them still does.
    """
    order: list[Node] = []
    section: list[Node] = []
    for value in values:
        if value in fixed or in_flat[value] is None or value.op.kind is Kind.MATRIX:
            order += [*_scheduled(section, in_flat), value]
            section = []
        else:
            section.append(value)
    return (*order, *_scheduled(section, in_flat))


def rounds(values: Sequence[Node], in_flat: Mapping[Node, str | None]) -> list[tuple[Node, ...]]:
    """The values, those of one round together: neighbours with one operation, none an operand of another."""
    grouped: list[list[Node]] = []
    for value in values:
        last, kind = grouped[-1] if grouped else [], _kind(value, in_flat)
        if last and kind and kind == _kind(last[0], in_flat) and not any(a in last for a in value.args):
            last.append(value)
        else:
            grouped.append([value])
    return [*map(tuple, grouped)]


def _kind(value: Node, in_flat: Mapping[Node, str | None]) -> tuple[Hashable, ...]:
    """The operation and the number that the vectors of a round share; empty for a value without a round."""
    if value.op not in ROUNDS or not in_flat[value]:
        return ()
    return value.op, *(a for a in value.args if value.op in WITH_NUMBERS and in_flat[a] == "")


def _scheduled(section: Sequence[Node], in_flat: Mapping[Node, str | None]) -> Iterator[Node]:
    """The values by list scheduling: of all ready values, the one with the longest way to the end.

    Leaves come first, since all that reads them can then be in one round.
    """
    inside = {value: place for place, value in enumerate(section)}
    lengths = _lengths(section, inside)
    left = {value: {a for a in value.args if a in inside} for value in section}
    while left:
        ready = [value for value, waits in left.items() if not waits]
        first = min(ready, key=lambda value: (value.op.kind is not Kind.LEAF, -lengths[value], inside[value]))
        kind = _kind(first, in_flat)
        chosen = [value for value in ready if _kind(value, in_flat) == kind] if kind else [first]
        yield from chosen
        for value in chosen:
            del left[value]
        for waits in left.values():
            waits.difference_update(chosen)


def _lengths(section: Sequence[Node], inside: Container[Node]) -> dict[Node, int]:
    """The number of values on the longest way from each value to the end of the section."""
    lengths = dict.fromkeys(section, 1)
    for value in reversed(section):
        for operand in value.args:
            if operand in inside:
                lengths[operand] = max(lengths[operand], lengths[value] + 1)
    return lengths
