"""A projection worked out tile by tile, for one tensor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from rulec.backend.layout import ITEM_SIZE
from rulec.compiler.scalars import evaluate_once
from rulec.language.node import Kind, Node, Op
from rulec.runtime.library import COMBINE
from rulec.runtime.projection import Projection, Step

if TYPE_CHECKING:
    from rulec.runtime.between import Between, InTiles

#: Bytes that tiles may take at least, however small gradients are: narrower ones take long.
LEAST_ROOM = 3 << 16

#: Tiles that there are at once of what is made of a product.
_AT_ONCE = 5

_ALL = slice(None)


@dataclass(frozen=True)
class Sizes:
    """How much of a product is worked out at once: `rows` and `cols` of it, of which what follows takes `part` columns
    at a time; `inner` rows of the right operand are copied at once, where it must be."""

    rows: int
    cols: int
    part: int
    inner: int


def sizes_for(rows: int, inner: int, cols: int, number: int, room: int) -> Sizes:
    """The sizes for a product of `rows` by `inner` and `inner` by `cols`, numbers of so many bytes, in about `room`."""
    third, number = room // 3, max(number, 1)
    top = _even(rows, third // (max(inner, 1) * number))
    block = _even(cols, third // (top * number))
    copied = room // 5
    # Where a product is as wide as its parameter, the left operand is gone when the rest follows.
    rest = room // 2 if block == cols else copied
    return Sizes(top, block, _even(block, rest // (_AT_ONCE * top * number)), _even(inner, copied // (block * number)))


def _even(length: int, most: int) -> int:
    """How long the parts of a length are: at most so many, about all alike, and at least 1."""
    parts = -(-length // max(1, most))
    return -(-length // max(1, parts)) or 1


def room_for(own: int, largest: int) -> int:
    """The bytes that tiles may take beside a gradient of so many, where the largest has `largest`.

    The two together are a twentieth larger than the largest gradient: only a tensor as large as that has narrow tiles.
    """
    return max(largest - own + largest // 20, LEAST_ROOM)


class Tiles:
    """Works out a projection for tensor i of a launch."""

    def __init__(self, between: Between, projection: Projection, i: int) -> None:
        self.between, self.projection, self.i = between, projection, i
        self.around, self.library = cast("InTiles", between.around), between.library
        self._reduced: dict[Node, dict[tuple[int, int], Any]] = {value: {} for value in projection.reductions}

    def work_out(self) -> dict[Node, Any]:
        """Stores what is stored on the way; the reductions."""
        rows, inner, cols, number = self._extents()
        sizes = sizes_for(rows, inner, cols, number, self.around.room(self.i))
        with np.errstate(all="ignore"):
            for band in _cut(rows, sizes.rows):
                self._band(band, inner, cols, sizes)
        return {value: self._whole(value, found) for value, found in self._reduced.items()}

    def _extents(self) -> tuple[int, int, int, int]:
        """The rows of the product, those of its right operand, their columns, and the bytes of one number of each
        matrix of the batch."""
        batch, inner, cols = self.around.extents(self.i)
        assert self.projection.axes.rows is not None
        rows = int(evaluate_once(self.projection.axes.rows, self.around.hyper(self.i), self.around.facts(self.i), {}))
        return rows, inner, cols, batch * ITEM_SIZE[self.around.compute]

    def _band(self, rows: slice, inner: int, width: int, sizes: Sizes) -> None:
        """Some rows of the product, and what follows from them."""
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
        """The product of some rows and columns, a sum over parts of the right operand where these are copies."""
        right = self.projection.right
        copies = len(right) > 1 or self.around.copies(str(right[0].value.arg))
        made = None
        for part in _cut(inner, sizes.inner if copies else inner):
            made = self.library.product(left[..., part], self._chain(right, part, cols), made)
        return made

    def _chain(self, steps: Sequence[Step], rows: slice, cols: slice, found: dict[Node, Any] | None = None) -> Any:
        """These rows and columns of values that are made of each other; the last of them."""
        found, made = found or {}, None
        for step in steps:
            made = found[step.value] = self._value(step.value, found, rows, cols)
            for store in step.stores:
                self.around.store(store.buffer, self.i, rows, cols, found[store.value])
            for value in step.over:
                del found[value]
        return made

    def _value(self, value: Node, found: Mapping[Node, Any], rows: slice, cols: slice) -> Any:
        if value.op is Op.LOAD:
            return self.around.tile(str(value.arg), self.i, rows, cols)
        if value.op.kind is Kind.RANDOM:
            return self.between.random(value, self.i, rows)
        if value.op.kind is Kind.REDUCE:
            return self._reduce(value, found[value.args[0]], rows, cols)
        operands = [found[a] if a in found else self._beside(a, rows, cols) for a in value.args]
        return self.between.rounded(value, self.library.arithmetic[value.op](*operands))

    def _beside(self, value: Node, rows: slice, cols: slice) -> Any:
        """What is no part of the tile: a number, or these rows or columns of a vector."""
        found, letters = self.between.values[value], self.between.plan.axes[value].letters
        if set(letters) <= {"k", "n"}:
            return self.library.at(found, self.i)
        return found[self.i][:, rows if "i" in letters else _ALL, cols if "j" in letters else _ALL]

    # Reductions

    def _reduce(self, value: Node, operand: Any, rows: slice, cols: slice) -> None:
        """Reduces a tile, and puts the result together with those of others that are of the same rows and columns."""
        letters = self.between.plan.axes[value].letters
        axes = tuple(axis for axis, letter in enumerate("bij") if letter not in letters)
        place = rows.start if "i" in letters else 0, cols.start if "j" in letters else 0
        made, found = self.library.reduce(value.op, operand, axes), self._reduced[value]
        found[place] = self.library.arithmetic[COMBINE[value.op]](found[place], made) if place in found else made

    def _whole(self, value: Node, found: Mapping[tuple[int, int], Any]) -> Any:
        """A reduction of all tiles."""
        pieces = [found[place] for place in sorted(found)]
        along = 1 if "i" in self.between.plan.axes[value].letters else 2
        return pieces[0] if len(pieces) == 1 else self.library.join(pieces, along)


def _cut(length: int, size: int) -> Iterator[slice]:
    """A length in parts of a size; one, of nothing, where it is 0."""
    for start in range(0, max(length, 1), max(size, 1)):
        yield slice(start, min(start + size, length))
