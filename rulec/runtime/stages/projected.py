"""A projection of small matrices of all shapes in flat arrays, so that one operation serves all of them.

A value is one vector: the matrices of all tensors of some sets, one after the other. Only products are computed set by
set. `rulec.runtime.stages.tiles` has the projections of larger matrices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from rulec.array_api.reductions import segments_of
from rulec.array_api.slices import Pieces
from rulec.compiler.scalars import evaluate_once
from rulec.language.expr.node import Kind, Node, Op
from rulec.language.expr.static import statics
from rulec.runtime.buckets.flat import MOST, Flats
from rulec.runtime.buckets.plan import Projection, Step
from rulec.runtime.stages.sets import SetValues
from rulec.runtime.stages.sources import ValueSource


class InFlat(ValueSource, Protocol):
    """A value source with states of several tensors as one vector.

    `small` is the most elements of a tensor in a stack. `flats_of` gives the cuts of matrices with these numbers of
    matrices, rows and columns. `joined` gives a state of some tensors as a vector in the compute dtype, and
    `write_joined` writes one. `lies_in_order` tells whether the elements of these states lie in memory in their order.
    """

    @property
    def small(self) -> int: ...
    def flats_of(self, extents: Sequence[tuple[int, int, int]]) -> Flats: ...
    def lies_in_order(self, buffers: Sequence[str], places: Sequence[int]) -> bool: ...
    def joined(self, buffer: str, places: Sequence[int]) -> Any: ...
    def write_joined(self, buffer: str, places: Sequence[int], flat: Any, flats: Flats) -> None: ...


#: Computes the values of one set of matrices, from values of the set by value.
InSet = Callable[[Node, int, Mapping[Node, Any]], Any]


def groups_of(known: SetValues, source: InFlat, projection: Projection) -> list[list[int]]:
    """The sets of small matrices that are projected together, at most `MOST` elements of parameters in each group.

    Sets in no group are projected on their own. There are no groups in main memory, and where a value of the projection
    needs more than numbers, columns of the parameter and values like the product.
    """
    if not known.joins_flat or not _is_plain(known, projection):
        return []
    loads = {str(step.value.arg) for step in projection.steps if step.value.op is Op.LOAD}
    buffers = [*loads | projection.stored]
    groups: list[list[int]] = []
    room = 0
    for k, places in enumerate(known.sets):
        size = sum(math.prod(source.extents(i)) for i in places)
        if not _is_small(source, places) or not source.lies_in_order(buffers, places):
            continue
        if size > room or not groups:
            groups.append([])
            room = MOST
        groups[-1].append(k)
        room -= size
    return groups


def _is_small(source: InFlat, places: Sequence[int]) -> bool:
    """Whether the matrices of a set are small enough for stacks, and its tensors whole."""
    first = places[0]
    size = math.prod(source.extents(first))
    whole = source.lines(first) is None and not segments_of(source.facts(first))
    return len(places) > 1 or (whole and 0 < size <= source.small)


def _is_plain(known: SetValues, projection: Projection) -> bool:
    """Whether all values of a projection but its right operand can be flat arrays."""
    inside = {projection.product} | {step.value for step in (*projection.left, *projection.steps)}
    computed = [step.value for step in (*projection.left, *projection.steps) if step.value.op.kind is not Kind.RANDOM]
    beside = {a for v in computed for a in v.args if a not in inside and not known.is_number(a)}
    reduced = [v for v in projection.reductions if not known.is_number(v)]
    return (
        sum(step.value.op.kind is Kind.RANDOM for step in projection.left) == 1
        and not any(known.axes(step.value).elementwise for step in projection.left)
        and not any(statics(v) for v in computed if v.op is not Op.LOAD)
        and all((known.plan.in_flat[a] or "i") in ("b", "j", "bj") for a in beside)
        and all((known.plan.in_flat[v] or "i") in ("b", "j", "bj") for v in reduced)
    )


class FlatProjection:
    """Computes a projection for the tensors of some sets of a launch; `in_set` computes the values of one set."""

    def __init__(
        self, known: SetValues, source: InFlat, projection: Projection, sets: Sequence[int], in_set: InSet
    ) -> None:  # fmt: skip
        self.known, self.source, self.projection, self.sets, self.in_set = known, source, projection, sets, in_set
        self.library = known.library
        #: The tensors, in the order of their matrices.
        self.places = [i for k in sets for i in known.sets[k]]
        (drawn,) = (step.value for step in projection.left if step.value.op.kind is Kind.RANDOM)
        self.left = self._flats_of(lambda i: self._drawn(drawn, i))
        self.flats = self._flats_of(self._extents)

    def _flats_of(self, extents: Callable[[int], tuple[int, int, int]]) -> Flats:
        """The cuts of matrices by the extents of a tensor, which are the same in a set."""
        each = [(extents(places[0]), len(places)) for places in (self.known.sets[k] for k in self.sets)]
        return self.source.flats_of([x for x, count in each for _ in range(count)])

    def _drawn(self, value: Node, i: int) -> tuple[int, int, int]:
        """The one random matrix of tensor i, its rows and columns."""
        rows, cols = self.known.statics(value, i)
        return 1, int(rows), int(cols)

    def _extents(self, i: int) -> tuple[int, int, int]:
        """The matrices of the product for tensor i, their rows and columns."""
        batch, _, cols = self.source.extents(i)
        rows = self.projection.axes.rows
        assert rows is not None
        return batch, int(evaluate_once(rows, self.source.hyper(i), self.source.facts(i), {})), cols

    def work_out(self) -> dict[Node, Any]:
        """Writes the projection's states. Its reductions, by value, in the order of `places`."""
        reduced: dict[Node, Any] = {}
        with np.errstate(all="ignore"):
            left = self._chain(self.projection.left, self.left, {}, {})
            self._chain(self.projection.steps, self.flats, {self.projection.product: self._product(left)}, reduced)
        return reduced

    def _chain(self, steps: Sequence[Step], flats: Flats, values: dict[Node, Any], reduced: dict[Node, Any]) -> Any:
        """Computes steps in order, and returns the last value. Reductions go to `reduced`."""
        last = None
        for step in steps:
            value = step.value
            if value.op.kind is Kind.REDUCE:
                reduced[value] = self._reduced(value, values[value.args[0]], flats)
            else:
                last = values[value] = self._value(value, flats, values)
            for store in step.stores:
                self.source.write_joined(store.buffer, self.places, values[store.value], flats)
            for over in step.over:
                values.pop(over, None)
        return last

    def _value(self, value: Node, flats: Flats, values: Mapping[Node, Any]) -> Any:
        if value.op.kind is Kind.RANDOM:
            return self.known.drawn(value, self.places, flats.cuts("bij").sizes.tolist())
        if value.op is Op.LOAD:
            return self.source.joined(str(value.arg), self.places)
        narrow = self.known.numbers_are_narrow(value.args)
        operands = [values[a] if a in values else self._beside(a, narrow, flats) for a in value.args]
        return self.known.rounded(value, self.library.arithmetic[value.op](*operands))

    def _beside(self, value: Node, narrow: bool, flats: Flats) -> Any:
        """An operand from before the projection: one number for all, or a number or a column for each element."""
        operand, letters = self.known.values[value], self.known.plan.in_flat[value] or ""
        if not self.known.is_number(value):
            pieces = operand if isinstance(operand, Pieces) else None
            chosen = pieces.chosen(self.places) if pieces is not None else [operand[i] for i in self.places]
            return flats.spread(flats.taken(chosen, letters).flat, letters, "bij")
        if not getattr(operand, "ndim", 0):
            return operand
        if self.places != [*range(self.known.count)]:
            operand = self.library.take(operand, np.array(self.places, np.int64))
        return flats.spread(self.library.cast(operand, self.source.compute) if narrow else operand, "", "bij")

    def _product(self, left: Any) -> Any:
        """The products of all sets."""
        products = []
        for (k, stack), right in zip(self._stacks(left), self._right(), strict=True):
            local = {self.projection.product.args[0]: stack, self.projection.product.args[1]: right}
            products.append(self.in_set(self.projection.product, k, local).reshape(-1))
        return products[0] if len(products) == 1 else self.library.join(products, 0)

    def _stacks(self, left: Any) -> Iterator[tuple[int, Any]]:
        """The left operand of each set, as a stack."""
        shapes, sizes = self.left.cuts("bij").shapes, self.left.cuts("bij").sizes
        ends = np.cumsum([len(self.known.sets[k]) for k in self.sets]).tolist()
        starts = [0, *ends[:-1]]
        counts = [int(sizes[start:end].sum()) for start, end in zip(starts, ends, strict=True)]
        for k, start, part in zip(self.sets, starts, self.library.cut(left, counts), strict=True):
            yield k, part.reshape(-1, *shapes[start][1:])

    def _right(self) -> Iterator[Any]:
        """The right operand of each set, as a stack."""
        for k in self.sets:
            local: dict[Node, Any] = {}
            for step in self.projection.right:
                value = step.value
                if value.op is Op.LOAD:
                    local[value] = self.source.stacked(str(value.arg), self.known.sets[k])
                else:
                    local[value] = self.in_set(value, k, local)
            yield local[self.projection.right[-1].value]

    def _reduced(self, value: Node, flat: Any, flats: Flats) -> Any:
        """A reduction within each tensor, as a vector."""
        after = "" if self.known.is_number(value) else self.known.plan.in_flat[value] or ""
        return flats.reduced(value.op, Pieces(flat, flats.cuts("bij")), "bij", after)
