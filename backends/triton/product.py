"""Calls of a kernel with an update in the epilogue of a product: one launch for each parameter."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rulec.backend.capabilities import Product
from rulec.backend.protocol import Rows, Scratch, Written
from rulec.compiler.ir import Program
from rulec.compiler.layout import Layout
from rulec.compiler.view import MatrixView
from rulec.errors import BackendUnavailable
from rulec.kernel.place import used_buffers

from .memory import current, floats, is_capturing, truth_bytes, uploads
from .work import compiler_errors, refusal


@dataclass(frozen=True)
class Tile:
    """The cut of a product: tiles of `high` rows and `wide` columns, `deep` tokens at a time.

    `tall` tiles below one another come before those beside them. A tile is updated in `parts` parts. `warps` and
    `stages` (the number of loads in flight) are for the compiler. With `described`, the device itself copies tiles of
    aligned factors.
    """

    high: int
    wide: int
    deep: int
    parts: int
    warps: int
    stages: int
    described: bool = False
    tall: int = 8

    @property
    def constants(self) -> dict[str, int]:
        """The constants of a kernel's compilation."""
        return {"HIGH": self.high, "WIDE": self.wide, "DEEP": self.deep, "TALL": self.tall, "PARTS": self.parts}

    def count(self, height: int, width: int) -> int:
        """The number of tiles in a matrix."""
        return -(-height // self.high) * -(-width // self.wide)


#: Tiles for factors of 16 bits, the largest first, by the compute capability of NVIDIA's GPUs, or for AMD's (0). Their
#: kernels keep nothing in local memory.
_HALF: Mapping[int, tuple[Tile, ...]] = {
    9: (
        Tile(128, 256, 64, 8, 8, 4, described=True),
        Tile(128, 128, 64, 4, 8, 4, described=True),
        Tile(64, 64, 64, 2, 4, 4),
    ),
    8: (Tile(128, 128, 32, 4, 8, 3), Tile(64, 64, 32, 2, 8, 3)),
    0: (Tile(128, 128, 32, 4, 8, 2), Tile(64, 64, 32, 2, 4, 2)),
}
#: Tiles for factors of float32: products take as much time as sums there.
_SINGLE = (Tile(64, 64, 32, 2, 4, 3), Tile(32, 32, 32, 1, 4, 3))

#: Small tiles for Triton's interpreter, so that small matrices have tiles at their ends.
INTERPRETED = (Tile(32, 64, 16, 4, 4, 1, described=True), Tile(32, 32, 16, 2, 4, 1, described=True))


def tiles_for(factors: str, capability: int | None) -> tuple[Tile, ...]:
    """The tiles for factors of a dtype, the largest first. `capability` is of NVIDIA's GPUs; None for others."""
    if factors == "float32":
        return _SINGLE
    return _HALF[0 if capability is None else 9 if capability in (9, 10) else 8]


def tile_for(tiles: Sequence[Tile], height: int, width: int, processors: int) -> Tile:
    """The largest tile with at least one in the matrix for each processor, else the smallest."""
    return next((tile for tile in tiles if tile.count(height, width) >= processors), tiles[-1])


class ProductKernel:
    """The kernel of one program, layout and dtype of factors."""

    def __init__(self, program: Program, layout: Layout, factors: str, kernel: Any) -> None:
        self.program, self.layout, self.factors, self.kernel = program, layout, factors, kernel

    def bind(
        self, params: Sequence[Any], states: Sequence[dict[str, Any]], views: Sequence[MatrixView] = (),
        tiles: Sequence[Tile] = (),
    ) -> ProductCall:  # fmt: skip
        """A call over these matrices: contiguous, of the layout's dtypes, all on one device.

        `tiles` replace the device's choice of tiles.
        """
        return ProductCall(self, params, states, tiles)


class ProductCall:
    """The kernel bound to the parameters and states of one bucket."""

    def __init__(
        self, kernel: ProductKernel, params: Sequence[Any], states: Sequence[dict[str, Any]], tiles: Sequence[Tile]
    ) -> None:
        self._kernel, self._params, self._states = kernel, params, states
        self._device = params[0].device
        program = kernel.program
        self._fixed = [b for b in used_buffers(program, program.stages[0]) if b != "g"]
        self._uploads = uploads(self._device, 8 * len(program.columns))
        tiles_of_device, self._processors = machine(self._device, kernel.factors)
        self._tiles = tiles or tiles_of_device

    def __call__(
        self, stage: int, moving: Sequence[Product], rows: Rows, scratch: Scratch | None = None, *,
        tensors: Sequence[int] | None = None, stream: Any = None,
    ) -> Written:  # fmt: skip
        """Updates every parameter of the bucket, or `tensors` of it, in place. `moving` are their gradients."""
        positions = range(len(self._params)) if tensors is None else tensors
        with current(self._device, stream):
            table = self._table(rows.table, stream)
            stays = truth_bytes(rows.stays)
            for position, product in zip(positions, map(_side_by_side, moving), strict=True):
                self._launch(position, product, [table, int(rows.index[position]), stays, rows.scale])
        return Written(self._params, self._states)

    def _table(self, table: Any, stream: Any) -> Any:
        """The scalar table on the device."""
        if not isinstance(table, np.ndarray):
            return table
        words = np.ascontiguousarray(table).reshape(-1).view(np.int64)
        return floats(self._uploads.put(words, stream, stream, is_capturing(self._device)))

    def _launch(self, position: int, product: Product, tables: Sequence[Any]) -> None:
        param, states = self._params[position], self._states[position]
        (tokens, height), width = product.outputs.shape, product.inputs.shape[1]
        tile = tile_for(self._tiles, height, width, self._processors)
        if not param.numel():
            return
        arrays = [param if b == "p" else states[b] for b in self._fixed]
        lines = [product.outputs.stride(0), product.inputs.stride(0)]
        factors = _described(product, tile) if tile.described else None
        options = self._options(tile, tokens, height, width)
        options["DESCRIBED"] = factors is not None
        try:
            self._kernel.kernel[(tile.count(height, width),)](
                *(factors or (product.outputs, product.inputs)), *arrays, *tables, tokens, height, width, *lines,
                **options,
            )  # fmt: skip
        except compiler_errors() as error:
            raise BackendUnavailable(refusal(self._kernel.program.name, self._device, error)) from error

    def _options(self, tile: Tile, tokens: int, height: int, width: int) -> dict[str, Any]:
        """The constants of the kernel's compilation."""
        return {
            **tile.constants, "PRECISION": _precision(self._device),
            "ALL": not (height % tile.high or width % tile.wide), "EVEN": not tokens % tile.deep,
            "EMULATED": self._device.type == "cpu", "num_warps": tile.warps, "num_stages": tile.stages,
            "enable_fp_fusion": False,
        }  # fmt: skip


def _side_by_side(product: Product) -> Product:
    """The same product with contiguous lines: they need not be contiguous after a layer that sums."""
    factors = (product.outputs, product.inputs)
    outputs, inputs = (x if x.stride(1) == 1 else x.contiguous() for x in factors)
    return Product(outputs, inputs)


def _described(product: Product, tile: Tile) -> tuple[Any, Any] | None:
    """The factors as descriptors for the device's copies; None where they are not at multiples of 16 bytes."""
    try:
        from triton.tools.tensor_descriptor import TensorDescriptor
    except ImportError:  # before Triton 3.4
        return None
    factors = (product.outputs, product.inputs)
    item = product.inputs.element_size()
    if not len(product.inputs) or any(x.data_ptr() % 16 or x.stride(0) * item % 16 for x in factors):
        return None
    outputs, inputs = (
        TensorDescriptor.from_tensor(x, [tile.deep, wide])
        for x, wide in zip(factors, (tile.high, tile.wide), strict=True)
    )
    return outputs, inputs


@functools.cache
def machine(device: Any, factors: str) -> tuple[tuple[Tile, ...], int]:
    """The tiles for a device, and the number of its processors."""
    import torch

    if device.type == "cpu":
        return INTERPRETED, 1
    facts = torch.cuda.get_device_properties(device)
    return tiles_for(factors, None if torch.version.hip else facts.major), facts.multi_processor_count


def _precision(device: Any) -> str:
    """The precision of products of float32, the same as torch's."""
    import torch

    exact = device.type == "cpu" or torch.get_float32_matmul_precision() == "highest"
    return "ieee" if exact else "tf32"
