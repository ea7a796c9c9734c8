"""A projection worked out tile by tile, for one tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from rulec.arrays.reductions import REDUCTIONS
from rulec.compiler.layout import ITEM_SIZE
from rulec.compiler.scalars import evaluate_once
from rulec.language.node import Kind, Node, Op
from rulec.runtime.projection import Projection, Step
from rulec.runtime.surroundings import InTiles, LaunchValues

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


#: Makes a tile of a value from the tiles it is made of, its rows and its columns.
Make = Callable[[Mapping[Node, Any], slice, slice], Any]


class Tiles:
    """Works out a projection for tensor i of a launch.

    There are many tiles, and small ones: what is the same for all is found once.
    """

    def __init__(self, known: LaunchValues, projection: Projection, i: int) -> None:
        self.known, self.projection, self.i = known, projection, i
        self.around, self.library = cast(InTiles, known.around), known.library
        self._reduced: dict[Node, dict[tuple[int, int], Any]] = {value: {} for value in projection.reductions}
        steps = (*projection.left, *projection.right, *projection.steps)
        loads = {str(step.value.arg) for step in steps if step.value.op is Op.LOAD}
        self._buffers = {name: self.around.tiled(name, i) for name in loads | projection.stored}
        self._tiles = {projection.product} | {step.value for step in steps}
        self._makes = {step.value: self._make(step.value) for step in steps}

    def work_out(self) -> dict[Node, Any]:
        """Stores what is stored on the way; the reductions."""
        rows, inner, cols, number = self._extents()
        sizes = sizes_for(rows, inner, cols, number, self.around.room(self.i))
        try:
            with np.errstate(all="ignore"):
                for band in _cut(rows, sizes.rows):
                    self._band(band, inner, cols, sizes)
        finally:
            # They know this object, which knows the gradient: without a word it would stay until the next collection.
            self._makes.clear()
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
        copies = len(right) > 1 or self._buffers[str(right[0].value.arg)].copying is not None
        made = None
        for part in _cut(inner, sizes.inner if copies else inner):
            made = self.library.product(left[..., part], self._chain(right, part, cols), made)
        return made

    def _chain(self, steps: Sequence[Step], rows: slice, cols: slice, found: dict[Node, Any] | None = None) -> Any:
        """These rows and columns of values that are made of each other; the last of them."""
        found, made = found or {}, None
        for step in steps:
            made = found[step.value] = self._makes[step.value](found, rows, cols)
            for store in step.stores:
                self.around.writes()
                self._buffers[store.buffer].write(rows, cols, found[store.value])
            for value in step.over:
                del found[value]
        return made

    def _make(self, value: Node) -> Make:
        if value.op is Op.LOAD:
            buffer = self._buffers[str(value.arg)]
            return lambda _, rows, cols: buffer.read(rows, cols)
        if value.op.kind is Kind.RANDOM:
            return lambda _, rows, cols: self.known.random(value, self.i, rows)
        operands = [self._operand(a) for a in value.args]
        if value.op.kind is Kind.REDUCE:
            return lambda found, rows, cols: self._reduce(value, operands[0](found, rows, cols), rows, cols)
        function = self.library.arithmetic[value.op]
        if not self.known.is_rounded(value):
            return lambda found, rows, cols: function(*[take(found, rows, cols) for take in operands])
        cast_to, dtype = self.library.cast, self.around.compute
        return lambda found, rows, cols: cast_to(function(*[take(found, rows, cols) for take in operands]), dtype)

    def _operand(self, value: Node) -> Make:
        """A part of the tile; beside it a number, or these rows or columns of a vector."""
        if value in self._tiles:
            return lambda found, rows, cols: found[value]
        beside, letters = self.known.values[value], self.known.plan.axes[value].letters
        if set(letters) <= {"k", "n"}:
            number = self.library.at(beside, self.i)
            return lambda found, rows, cols: number
        vector, by_rows, by_cols = beside[self.i], "i" in letters, "j" in letters
        return lambda found, rows, cols: vector[:, rows if by_rows else _ALL, cols if by_cols else _ALL]

    # Reductions

    def _reduce(self, value: Node, operand: Any, rows: slice, cols: slice) -> None:
        """Reduces a tile, and puts the result together with those of others that are of the same rows and columns."""
        letters = self.known.plan.axes[value].letters
        axes = tuple(axis for axis, letter in enumerate("bij") if letter not in letters)
        place = rows.start if "i" in letters else 0, cols.start if "j" in letters else 0
        made, found = self.library.reduce(value.op, operand, axes), self._reduced[value]
        join = self.library.arithmetic[REDUCTIONS[value.op].join]
        found[place] = join(found[place], made) if place in found else made

    def _whole(self, value: Node, found: Mapping[tuple[int, int], Any]) -> Any:
        """A reduction of all tiles."""
        pieces = [found[place] for place in sorted(found)]
        along = 1 if "i" in self.known.plan.axes[value].letters else 2
        return pieces[0] if len(pieces) == 1 else self.library.join(pieces, along)


def _cut(length: int, size: int) -> Iterator[slice]:
    """A length in parts of a size; one, of nothing, where it is 0."""
    for start in range(0, max(length, 1), max(size, 1)):
        yield slice(start, min(start + size, length))
