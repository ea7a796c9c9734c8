"""A projection computed tile by tile, for one tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from rulec.array_api.reductions import REDUCTIONS
from rulec.compiler.layout import ITEM_SIZE
from rulec.compiler.scalars import evaluate_once
from rulec.language.expr.node import Kind, Node, Op
from rulec.runtime.buckets.plan import Projection, Step
from rulec.runtime.stages.sources import InTiles, LaunchValues

#: The least bytes for tiles, also with small gradients: narrower tiles are slow.
LEAST_ROOM = 3 << 16

#: The number of tiles after a product that exist at the same time.
_AT_ONCE = 5

_ALL = slice(None)


@dataclass(frozen=True)
class Sizes:
    """The sizes of tiles: `rows` and `cols` of the product at a time.

    The values after it take `part` of these columns at a time. If the right operand must be copied, `inner` rows of
    it are copied at a time.
    """

    rows: int
    cols: int
    part: int
    inner: int


def sizes_for(rows: int, inner: int, cols: int, number: int, room: int) -> Sizes:
    """The sizes for a product of (rows, inner) and (inner, cols), `number` bytes an element, in about `room` bytes."""
    third, number = room // 3, max(number, 1)
    top = _even(rows, third // (max(inner, 1) * number))
    block = _even(cols, third // (top * number))
    copied = room // 5
    # Where a product is as wide as its parameter, the left operand is gone when the rest follows.
    rest = room // 2 if block == cols else copied
    return Sizes(top, block, _even(block, rest // (_AT_ONCE * top * number)), _even(inner, copied // (block * number)))


def _even(length: int, most: int) -> int:
    """The length of equal parts of `length`: at most `most`, and at least 1."""
    parts = -(-length // max(1, most))
    return -(-length // max(1, parts)) or 1


def room_for(size: int, largest: int) -> int:
    """The bytes for tiles beside a gradient of `size` bytes, where the largest gradient has `largest`.

    Tiles and gradient together take a twentieth more than the largest gradient, so only the largest tensors have narrow
    tiles.
    """
    return max(largest - size + largest // 20, LEAST_ROOM)


#: Makes a tile of a value from tiles of its operands by value, its rows and its columns.
Make = Callable[[Mapping[Node, Any], slice, slice], Any]


class Tiles:
    """Computes a projection for tensor i of a launch.

    There are many small tiles, so everything common to them is prepared once.
    """

    def __init__(self, known: LaunchValues, projection: Projection, i: int) -> None:
        self.known, self.projection, self.i = known, projection, i
        self.source, self.library = cast(InTiles, known.source), known.library
        self._reduced: dict[Node, dict[tuple[int, int], Any]] = {value: {} for value in projection.reductions}
        steps = (*projection.left, *projection.right, *projection.steps)
        loads = {str(step.value.arg) for step in steps if step.value.op is Op.LOAD}
        self._buffers = {name: self.source.tiled(name, i) for name in loads | projection.stored}
        self._tiles = {projection.product} | {step.value for step in steps}
        self._makes = {step.value: self._make(step.value) for step in steps}

    def work_out(self) -> dict[Node, Any]:
        """Writes the projection's states. Its reductions, by value."""
        rows, inner, cols, number = self._extents()
        sizes = sizes_for(rows, inner, cols, number, self.source.room(self.i))
        try:
            with np.errstate(all="ignore"):
                for band in _cut(rows, sizes.rows):
                    self._band(band, inner, cols, sizes)
        finally:
            # They refer to this object, and it to the gradient: else both would stay until the next garbage collection.
            self._makes.clear()
        return {value: self._whole(value, pieces) for value, pieces in self._reduced.items()}

    def _extents(self) -> tuple[int, int, int, int]:
        """The rows of the product, the rows and columns of its right operand, and the bytes of one element.

        An element has one number for each matrix of the batch.
        """
        batch, inner, cols = self.source.extents(self.i)
        assert self.projection.axes.rows is not None
        rows = int(evaluate_once(self.projection.axes.rows, self.source.hyper(self.i), self.source.facts(self.i), {}))
        return rows, inner, cols, batch * ITEM_SIZE[self.source.compute]

    def _band(self, rows: slice, inner: int, width: int, sizes: Sizes) -> None:
        """Computes some rows of the product, and the values after them."""
        left = self._chain(self.projection.left, rows, _ALL)
        for cols in _cut(width, sizes.cols):
            product = self._product(left, inner, cols, sizes)
            if cols.stop == width:
                left = None
            for part in _cut(cols.stop - cols.start, sizes.part):
                at = slice(cols.start + part.start, cols.start + part.stop)
                self._chain(self.projection.steps, rows, at, {self.projection.product: product[..., part]})
            del product

    def _product(self, left: Any, inner: int, cols: slice, sizes: Sizes) -> Any:
        """The product of some rows and columns: a sum over parts of the right operand where it must be copied."""
        right = self.projection.right
        copies = len(right) > 1 or self._buffers[str(right[0].value.arg)].copying is not None
        product = None
        for part in _cut(inner, sizes.inner if copies else inner):
            product = self.library.product(left[..., part], self._chain(right, part, cols), product)
        return product

    def _chain(self, steps: Sequence[Step], rows: slice, cols: slice, values: dict[Node, Any] | None = None) -> Any:
        """Computes a tile of each step, in order, and returns the last. `values` has earlier tiles by value."""
        values, last = values or {}, None
        for step in steps:
            last = values[step.value] = self._makes[step.value](values, rows, cols)
            for store in step.stores:
                self.source.writes()
                self._buffers[store.buffer].write(rows, cols, values[store.value])
            for value in step.over:
                del values[value]
        return last

    def _make(self, value: Node) -> Make:
        if value.op is Op.LOAD:
            buffer = self._buffers[str(value.arg)]
            return lambda _, rows, cols: buffer.read(rows, cols)
        if value.op.kind is Kind.RANDOM:
            return lambda _, rows, cols: self.known.random(value, self.i, rows)
        operands = [self._operand(a) for a in value.args]
        if value.op.kind is Kind.REDUCE:
            return lambda values, rows, cols: self._reduce(value, operands[0](values, rows, cols), rows, cols)
        function = self.library.arithmetic[value.op]
        if not self.known.is_rounded(value):
            return lambda values, rows, cols: function(*[take(values, rows, cols) for take in operands])
        cast_to, dtype = self.library.cast, self.source.compute
        return lambda values, rows, cols: cast_to(function(*[take(values, rows, cols) for take in operands]), dtype)

    def _operand(self, value: Node) -> Make:
        """A function for the operand's part of a tile: a tile, a number, or some rows or columns of a vector."""
        if value in self._tiles:
            return lambda values, rows, cols: values[value]
        beside, letters = self.known.values[value], self.known.plan.axes[value].letters
        if set(letters) <= {"k", "n"}:
            number = self.library.at(beside, self.i)
            return lambda values, rows, cols: number
        vector, by_rows, by_cols = beside[self.i], "i" in letters, "j" in letters
        return lambda values, rows, cols: vector[:, rows if by_rows else _ALL, cols if by_cols else _ALL]

    # Reductions

    def _reduce(self, value: Node, operand: Any, rows: slice, cols: slice) -> None:
        """Reduces a tile, and combines the result with earlier tiles of the same rows or columns."""
        letters = self.known.plan.axes[value].letters
        axes = tuple(axis for axis, letter in enumerate("bij") if letter not in letters)
        place = rows.start if "i" in letters else 0, cols.start if "j" in letters else 0
        reduced, pieces = self.library.reduce(value.op, operand, axes), self._reduced[value]
        join = self.library.arithmetic[REDUCTIONS[value.op].join]
        pieces[place] = join(pieces[place], reduced) if place in pieces else reduced

    def _whole(self, value: Node, by_place: Mapping[tuple[int, int], Any]) -> Any:
        """A reduction of all tiles."""
        pieces = [by_place[place] for place in sorted(by_place)]
        along = 1 if "i" in self.known.plan.axes[value].letters else 2
        return pieces[0] if len(pieces) == 1 else self.library.join(pieces, along)


def _cut(length: int, size: int) -> Iterator[slice]:
    """Slices of `size` that cover a length; one empty slice where the length is 0."""
    for start in range(0, max(length, 1), max(size, 1)):
        yield slice(start, min(start + size, length))
