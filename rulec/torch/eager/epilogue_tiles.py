"""An update with a product as its gradient, a few rows at a time: each tile of the product is made, used, and gone."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rulec.backend.product import Product
from rulec.backend.protocol import Kernel, Rows, Scratch, Written
from rulec.errors import PartialUpdate
from rulec.torch.memory import plain_memory
from rulec.torch.tensors import DTYPES

#: Bytes of a tile at most: what the caches near the processors hold, and enough rows for a product to be fast.
TILE = {"cpu": 2 << 20, "cuda": 16 << 20}

#: A tile has more rows than half of these, whatever their size: libraries take products of fewer in another way, which
#: rounds otherwise than that of the whole.
_ROWS = 32


class TiledCall:
    """A kernel of one elementwise stage, bound to some matrices tile by tile; `dtype` is our name for the gradients'.

    As in any call, `tensors` are positions among the matrices; the gradients are products.
    """

    def __init__(
        self, kernel: Kernel, params: Sequence[Tensor], states: Sequence[dict[str, Tensor]], dtype: str
    ) -> None:
        self._kernel, self._params, self._states, self._dtype = kernel, params, states, DTYPES[dtype]
        self._bound: dict[int, _Bound] = {}

    def __call__(
        self, stage: int, moving: Sequence[Product], rows: Rows, scratch: Scratch | None = None, *,
        tensors: Sequence[int] | None = None, stream: Any = None,
    ) -> Written:  # fmt: skip
        """Updates every matrix, or `tensors` of them, in place."""
        positions = range(len(self._params)) if tensors is None else tensors
        for position, product in zip(positions, moving, strict=True):
            self._of(position).update(product, rows, int(rows.index[position]), stream)
        return Written(self._params, self._states)

    def _of(self, position: int) -> _Bound:
        if position not in self._bound:
            self._bound[position] = _Bound(self._kernel, self._params[position], self._states[position], self._dtype)
        return self._bound[position]

    def tile_bytes(self, product: Product) -> int:
        """The bytes of a tile of a product, in its factors' dtype and, where it is another, in the gradient's."""
        height, width = int(product.outputs.shape[1]), int(product.inputs.shape[1])
        own: torch.dtype = product.inputs.dtype
        item = self._dtype.itemsize
        rows = _highest(tile_spans(height, width, item, _room(product.inputs)))
        return rows * width * (item if own == self._dtype else item + own.itemsize)


class _Bound:
    """One matrix: the rows of its tiles, and the kernel bound to them as if each were a tensor."""

    def __init__(self, kernel: Kernel, param: Tensor, states: dict[str, Tensor], dtype: torch.dtype) -> None:
        height, width = param.shape
        self._spans = tile_spans(height, width, dtype.itemsize, _room(param))
        own = [{name: state[span] for name, state in states.items()} for span in self._spans]
        self._param, self._dtype, self._height = param, dtype, _highest(self._spans)
        self._call = kernel.bind([param[span] for span in self._spans], own) if param.numel() else None

    def update(self, product: Product, rows: Rows, row: int, stream: Any) -> None:
        """Makes each tile of the gradient and updates these rows with it."""
        if self._call is None:
            return
        index = np.full(len(self._spans), row, np.int64)
        own = Rows(rows.table, index, rows.stays, rows.scale)
        number = 0
        try:
            with plain_memory():
                tiles = _Tiles(product, self._param, self._dtype, self._height)
                for number, span in enumerate(self._spans):
                    self._call(0, [tiles.made(span)], own, tensors=[number], stream=stream)
        except BaseException as error:
            if number == 0:
                raise
            rows_done = self._spans[number].start
            raise PartialUpdate(
                f"an update failed after the first {rows_done} rows of a matrix of shape {tuple(self._param.shape)}: "
                f"{error}"
            ) from error


class _Tiles:
    """Memory for a tile of a product, in its factors' dtype and, where it is another, in the gradient's."""

    def __init__(self, product: Product, like: Tensor, dtype: torch.dtype, height: int) -> None:
        self._product = product
        shape = (height, like.shape[1])
        self._own = torch.empty(shape, dtype=product.inputs.dtype, device=like.device)
        self._cast = None if self._own.dtype == dtype else torch.empty(shape, dtype=dtype, device=like.device)

    def made(self, span: slice) -> Tensor:
        """The rows of the product; the memory is the next tile's too."""
        count = span.stop - span.start
        own = self._own[:count]
        torch.mm(self._product.outputs[:, span].t(), self._product.inputs, out=own)
        return own if self._cast is None else self._cast[:count].copy_(own)


def _room(tensor: Tensor) -> int:
    return TILE.get(tensor.device.type, TILE["cpu"])


def _highest(spans: Sequence[slice]) -> int:
    return max((span.stop - span.start for span in spans), default=0)


def tile_spans(height: int, width: int, item: int, room: int) -> list[slice]:
    """The rows of each tile of a matrix, as even as can be, of at most `room` bytes unless these are few rows."""
    most = max(_ROWS, room // max(1, width * item))
    count = -(-height // most)
    ends = [height * i // count for i in range(count + 1)] if count else []
    return [slice(first, last) for first, last in pairwise(ends)]
