"""The order of the values of a gap, in which vectors with one operation come one after the other, as a round.

A round is computed in one call on a device. The rows and columns of Adafactor take the same steps, so most rounds have
two values. Values of matrices stay at their places: in another order they would be in memory for longer.

Independent reductions are a round too: where tensors are sharded, one message completes those of one operation.
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterator, Mapping, Sequence

from rulec.language.expr.node import Kind, Node, walk
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


def rounds(
    values: Sequence[Node], in_flat: Mapping[Node, str | None], fixed: Container[Node] = ()
) -> list[tuple[Node, ...]]:  # fmt: skip
    """The values, those of one round together: neighbours of one kind, none of them an operand of another."""
    grouped: list[list[Node]] = []
    for value in values:
        last, kind = grouped[-1] if grouped else [], () if value in fixed else _kind(value, in_flat)
        alike = last and kind and last[0] not in fixed and kind == _kind(last[0], in_flat)
        if alike and not any(a in last for a in value.args):
            last.append(value)
        else:
            grouped.append([value])
    return [*map(tuple, grouped)]


def _kind(value: Node, in_flat: Mapping[Node, str | None]) -> tuple[Hashable, ...]:
    """The operation and the number that vectors of a round share, or the kind of reductions; empty without a round."""
    if value.op.kind is Kind.REDUCE:
        return (Kind.REDUCE,)
    if value.op not in ROUNDS or not in_flat[value]:
        return ()
    return value.op, *(a for a in value.args if value.op in WITH_NUMBERS and in_flat[a] == "")


def _scheduled(section: Sequence[Node], in_flat: Mapping[Node, str | None]) -> Iterator[Node]:
    """The values by list scheduling: of all ready values, the one with the longest way to the end.

    Leaves come first, since all that reads them can then be in one round. A reduction waits for values that lead to
    others which need no more reductions before them than it does: then they are one round.
    """
    inside = {value: place for place, value in enumerate(section)}
    lengths, depths = _lengths(section, inside), _depths(section)
    left = {value: {a for a in value.args if a in inside} for value in section}

    def order(value: Node) -> tuple[bool, int, int]:
        return value.op.kind is not Kind.LEAF, -lengths[value], inside[value]

    while left:
        ready = [value for value, waits in left.items() if not waits]
        first = min(ready, key=order)
        if first.op.kind is Kind.REDUCE:
            leading = {a for value in left if value in depths and depths[value] <= depths[first] for a in walk([value])}
            first = min(
                (value for value in ready if value in leading and value not in depths), key=order, default=first
            )
        kind = _kind(first, in_flat)
        chosen = [value for value in ready if _kind(value, in_flat) == kind] if kind else [first]
        yield from chosen
        for value in chosen:
            del left[value]
        for waits in left.values():
            waits.difference_update(chosen)


def _depths(section: Sequence[Node]) -> dict[Node, int]:
    """The number of reductions on the longest way to each reduction of the section, with itself."""
    depths: dict[Node, int] = {}
    for value in section:
        depths[value] = max((depths.get(a, 0) for a in value.args), default=0) + (value.op.kind is Kind.REDUCE)
    return {value: depth for value, depth in depths.items() if value.op.kind is Kind.REDUCE}


def _lengths(section: Sequence[Node], inside: Container[Node]) -> dict[Node, int]:
    """The number of values on the longest way from each value to the end of the section."""
    lengths = dict.fromkeys(section, 1)
    for value in reversed(section):
        for operand in value.args:
            if operand in inside:
                lengths[operand] = max(lengths[operand], lengths[value] + 1)
    return lengths
