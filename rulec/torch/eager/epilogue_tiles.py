"""An update a few rows at a time, as of a product that is its gradient: each tile is made, used, and gone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from rulec.backend.product import GradientRows, Product
from rulec.backend.protocol import Kernel, Rows, Scratch, Written
from rulec.errors import BackendUnsupported, PartialUpdate
from rulec.runtime.bucket import Version
from rulec.runtime.estimate import OtherCalls
from rulec.runtime.launch import Launch
from rulec.torch.memory import plain_memory
from rulec.torch.tensors import DTYPES, dtype_name

#: Bytes of a tile at most: what the caches near the processors hold, and enough rows for a product to be fast.
TILE = {"cpu": 2 << 20, "cuda": 16 << 20}

#: A tile has more rows than half of these, whatever their size: libraries take products of fewer in another way, which
#: rounds otherwise than that of the whole.
_ROWS = 32


class TiledCall:
    """A kernel of one elementwise stage, bound to some tensors tile by tile; `dtype` is our name for the gradients'.

    As in any call, `tensors` are positions among the tensors. The gradients are products of matrices, or whatever else
    makes rows; a tensor of more dimensions is seen as a matrix that has a row for each index of its first.
    """

    def __init__(
        self, kernel: Kernel, params: Sequence[Tensor], states: Sequence[dict[str, Tensor]], dtype: str
    ) -> None:
        self._kernel, self._params, self._states, self._dtype = kernel, params, states, DTYPES[dtype]
        self._bound: dict[int, _Bound] = {}

    def __call__(
        self, stage: int, moving: Sequence[Product | GradientRows], rows: Rows, scratch: Scratch | None = None, *,
        tensors: Sequence[int] | None = None, stream: Any = None,
    ) -> Written:  # fmt: skip
        """Updates every tensor, or `tensors` of them, in place."""
        positions = range(len(self._params)) if tensors is None else tensors
        for position, gradient in zip(positions, moving, strict=True):
            self._of(position).update(source_of(gradient), rows, int(rows.index[position]), stream)
        return Written(self._params, self._states)

    def _of(self, position: int) -> _Bound:
        if position not in self._bound:
            self._bound[position] = _Bound(self._kernel, self._params[position], self._states[position], self._dtype)
        return self._bound[position]

    def tile_bytes(self, position: int, gradient: Product | GradientRows) -> int:
        """The bytes of a tile for the tensor at a position, in the dtype of the rows made and in the gradient's."""
        param, dtype = self._params[position], source_of(gradient).dtype
        item = self._dtype.itemsize
        rows = _highest(tile_spans(*_matrix(param), item, _room(param)))
        return rows * _matrix(param)[1] * (item if dtype == self._dtype else item + dtype.itemsize)


@dataclass(frozen=True)
class _ProductRows:
    """The rows of a product."""

    product: Product

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.product.inputs.dtype
        return dtype

    def rows(self, span: slice, out: Tensor) -> None:
        torch.mm(self.product.outputs[:, span].t(), self.product.inputs, out=out)


def source_of(gradient: Product | GradientRows) -> GradientRows:
    """What makes a gradient's rows."""
    return _ProductRows(gradient) if isinstance(gradient, Product) else gradient


def _matrix(param: Tensor) -> tuple[int, int]:
    """The rows of a tensor, and the elements of each."""
    height = int(param.shape[0]) if param.dim() else 1
    return height, param.numel() // max(1, height)


class _Bound:
    """One tensor: the rows of its tiles, and the kernel bound to them as if each were a tensor."""

    def __init__(self, kernel: Kernel, param: Tensor, states: dict[str, Tensor], dtype: torch.dtype) -> None:
        self._spans = tile_spans(*_matrix(param), dtype.itemsize, _room(param))
        tiles = [{name: state[span] for name, state in states.items()} for span in self._spans]
        self._param, self._dtype, self._height = param, dtype, _highest(self._spans)
        self._call = kernel.bind([param[span] for span in self._spans], tiles) if param.numel() else None

    def update(self, source: GradientRows, rows: Rows, row: int, stream: Any) -> None:
        """Makes each tile of the gradient and updates these rows with it."""
        if self._call is None:
            return
        index = np.full(len(self._spans), row, np.int64)
        tile_rows = Rows(rows.table, index, rows.stays, rows.scale)
        number = 0
        try:
            with plain_memory():
                tiles = _Tiles(source, self._param, self._dtype, self._height)
                for number, span in enumerate(self._spans):
                    self._call(0, [tiles.filled(span)], tile_rows, tensors=[number], stream=stream)
        except BaseException as error:
            if number == 0:
                raise
            rows_done = self._spans[number].start
            raise PartialUpdate(
                f"an update failed after the first {rows_done} rows of a tensor of shape {tuple(self._param.shape)}: "
                f"{error}"
            ) from error


class _Tiles:
    """Memory for a tile of a gradient, in the dtype of the rows made and, where it is another, in the gradient's."""

    def __init__(self, source: GradientRows, like: Tensor, dtype: torch.dtype, height: int) -> None:
        self._source = source
        shape = (height, _matrix(like)[1])
        self._memory = torch.empty(shape, dtype=source.dtype, device=like.device)
        self._cast = None if self._memory.dtype == dtype else torch.empty(shape, dtype=dtype, device=like.device)

    def filled(self, span: slice) -> Tensor:
        """The rows of the gradient; the memory is the next tile's too."""
        count = span.stop - span.start
        tile = self._memory[:count]
        self._source.rows(span, tile)
        return tile if self._cast is None else self._cast[:count].copy_(tile)


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


#: How a product becomes an update: in one kernel where the backend has one, tile by tile, or as is fastest there.
Way = Literal["auto", "kernel", "tiles"]


class ProductCalls:
    """The calls of kernels for gradients that are products, or made by rows, bound to the tensors of buckets."""

    def __init__(self, way: Way = "auto") -> None:
        self._way = way
        self._calls = OtherCalls()

    def give(self, launch: Launch, gradient: Product | GradientRows) -> int:
        """Has a launch of one tensor make the gradient itself. Nothing is run yet.

        The bytes of the gradient that there are at once, then: of a tile, or none.
        """
        factors = dtype_name(gradient.inputs.dtype) if isinstance(gradient, Product) else ""
        call = self._calls.give(launch, factors, lambda: self._bound(launch, factors))
        launch.grads = [gradient]
        position = launch.part.positions[0] if launch.part.positions else 0
        return call.tile_bytes(position, gradient) if isinstance(call, TiledCall) else 0

    def _bound(self, launch: Launch, factors: str) -> Any:
        """A call for products of factors of a dtype, or for gradients that are made by rows."""
        version, bucket = launch.version, launch.part.bucket
        kernel = self._kernel(version, bucket.backend, factors) if factors else None
        if kernel is not None:
            return kernel.bind(bucket.params, bucket.states)
        return TiledCall(version.kernel, bucket.params, bucket.states, version.layout.dtype("g"))

    def _kernel(self, version: Version, backend: Any, factors: str) -> Any:
        """The backend's kernel that makes the product; None where tiles are taken."""
        if self._way == "tiles" or not hasattr(backend, "build_epilogue"):
            return None
        if self._way == "auto" and factors == "float32":
            return None  # products of float32 in full are faster by the library
        try:
            source = backend.emit_epilogue(version.program, version.layout, factors)
        except BackendUnsupported:
            return None
        return backend.build_epilogue(version.program, version.layout, factors, source)
