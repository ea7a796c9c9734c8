"""An update a few rows at a time, as of a product that is its gradient: each tile is made, used, and gone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from rulec.backend.capabilities import EpilogueKernels, GradientRows, Product
from rulec.backend.protocol import Kernel, Rows, Scratch, Written
from rulec.compiler.layout import scale_name
from rulec.errors import BackendUnsupported, PartialUpdate
from rulec.formats import Format
from rulec.runtime.buckets.bucket import Version
from rulec.runtime.buckets.launch import Launch
from rulec.runtime.stages.noise import OtherCalls
from rulec.torch.tensors.fake import plain_memory
from rulec.torch.tensors.tensors import DTYPES, dtype_name

#: Bytes of a tile at most: what the caches near the processors hold, and enough rows for a product to be fast.
TILE = {"cpu": 2 << 20, "cuda": 16 << 20}

#: A tile has more rows than half of these, whatever their size: libraries take products of fewer in another way, which
#: rounds otherwise than that of the whole.
_ROWS = 32


#: States in codes by name, and their formats.
Formats: TypeAlias = Sequence[tuple[str, Format]]


class TiledCall:
    """A kernel of one elementwise stage, bound to some tensors tile by tile; `dtype` is our name for the gradients'.

    As in any call, `tensors` are positions among the tensors. The gradients are products of matrices, or whatever else
    makes rows; a tensor of more dimensions is seen as a matrix that has a row for each index of its first. `formats`
    are those of states in codes, by name.
    """

    def __init__(
        self, kernel: Kernel, params: Sequence[Tensor], states: Sequence[dict[str, Tensor]], dtype: str,
        formats: Formats = (),
    ) -> None:  # fmt: skip
        self._kernel, self._params, self._states, self._dtype = kernel, params, states, DTYPES[dtype]
        self._formats = formats
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
            param, states = self._params[position], self._states[position]
            self._bound[position] = _Bound(self._kernel, param, states, self._dtype, self._formats)
        return self._bound[position]

    def tile_bytes(self, position: int, gradient: Product | GradientRows) -> int:
        """The bytes of a tile for the tensor at a position, in the dtype of the rows made and in the gradient's."""
        param, dtype = self._params[position], source_of(gradient).dtype
        item = self._dtype.itemsize
        rows = _highest(_spans(param, item, self._formats))
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
    """The source of a gradient's rows."""
    return _ProductRows(gradient) if isinstance(gradient, Product) else gradient


def _matrix(param: Tensor) -> tuple[int, int]:
    """The rows of a tensor, and the elements of each."""
    height = int(param.shape[0]) if param.dim() else 1
    return height, param.numel() // max(1, height)


class _Bound:
    """One tensor: the rows of its tiles, and the kernel bound to them as if each were a tensor."""

    def __init__(
        self, kernel: Kernel, param: Tensor, states: dict[str, Tensor], dtype: torch.dtype, formats: Formats
    ) -> None:
        self._spans = _spans(param, dtype.itemsize, formats)
        tiles = [_tile(states, span, _matrix(param)[1], formats) for span in self._spans]
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


def _tile(states: dict[str, Tensor], span: slice, width: int, formats: Formats) -> dict[str, Tensor]:
    """The states of a tile: rows, or of codes the blocks and the pairs of these rows."""
    tile = {name: state[span] for name, state in states.items()}
    first, last = span.start * width, span.stop * width
    for name, form in formats:
        if form.bits == 4:
            tile[name] = states[name][first // 2 : -(-last // 2)]
        tile[scale_name(name)] = states[scale_name(name)][first // form.block : -(-last // form.block)]
    return tile


def _spans(param: Tensor, item: int, formats: Formats) -> list[slice]:
    """The rows of the tiles of a tensor. Each begins at a block of every state in codes."""
    height, width = _matrix(param)
    step = math.lcm(*(form.block // math.gcd(form.block, max(1, width)) for _, form in formats))
    return tile_spans(height, width, item, _room(param), step)


def _room(tensor: Tensor) -> int:
    return TILE.get(tensor.device.type, TILE["cpu"])


def _highest(spans: Sequence[slice]) -> int:
    return max((span.stop - span.start for span in spans), default=0)


def tile_spans(height: int, width: int, item: int, room: int, step: int = 1) -> list[slice]:
    """The rows of each tile of a matrix, as even as can be, of at most `room` bytes unless these are few rows.

    Tiles begin at multiples of `step` rows, and those of few rows are joined to others.
    """
    most = max(1, max(_ROWS, room // max(1, width * item)) // step)
    steps = -(-height // step)
    count = -(-steps // most)
    ends = [0]
    for i in range(1, count):
        end = step * (steps * i // count)
        if min(end - ends[-1], height - end) >= _ROWS // 2:
            ends.append(end)
    return [slice(first, last) for first, last in pairwise([*ends, height])] if height else []


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
        kernel = self._kernel(version, bucket.capabilities.epilogue, factors) if factors else None
        if kernel is not None:
            return kernel.bind(bucket.params, bucket.states)
        layout = version.layout
        return TiledCall(version.kernel, bucket.params, bucket.states, layout.dtype("g"), layout.formats)

    def _kernel(self, version: Version, kernels: EpilogueKernels | None, factors: str) -> Kernel | None:
        """The backend's kernel that makes the product; None where tiles are taken."""
        if self._way == "tiles" or version.layout.formats or kernels is None:
            return None
        if self._way == "auto" and factors == "float32":
            return None  # products of float32 in full are faster by the library
        try:
            source = kernels.emit_epilogue(version.program, version.layout, factors)
        except BackendUnsupported:
            return None
        return kernels.build_epilogue(version.program, version.layout, factors, source)
