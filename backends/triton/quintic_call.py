"""Calls of the products of `newton_schulz`: one launch for each product of a stack of matrices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rulec.backend.quintic import WORTH_HALVING as _WORTH_HALVING
from rulec.errors import BackendUnavailable

from .memory import current
from .product import Tile, machine
from .work import compiler_errors, refusal

#: So many processors need one tile of a matrix among them: a stack has several matrices.
_SHARED = 4


class QuinticProducts:
    """The products of `newton_schulz` for stacks `(batch, rows, cols)` of one dtype on one GPU.

    Stacks in another memory order than that of their shape are copied. The tile depends on the shape of a matrix and on
    the GPU alone, so the bits of a matrix do not depend on its neighbours.
    """

    def __init__(self, kernel: Any, tiles: Sequence[Tile] = ()) -> None:
        """`tiles` replace the device's."""
        self._kernel, self._tiles = kernel, tiles

    def pays(self, rows: int, cols: int) -> bool:
        """Whether matrices are large enough."""
        return min(rows, cols) >= _WORTH_HALVING

    def gram(self, y: Any) -> Any:
        """The products of each matrix and its transpose, with the shorter side twice: exactly symmetric."""
        batch, rows, cols = y.shape
        tall, side = rows > cols, min(rows, cols)
        return self._half(y, None, y.new_empty(batch, side, side), tall)

    def polynomial(self, gram: Any, b: float, c: float) -> Any:
        """`b*x + c*x @ x` of symmetric matrices, exactly symmetric."""
        return self._half(gram, gram, gram.new_empty(gram.shape), False, b, c)

    def following(self, y: Any, polynomial: Any, a: float) -> Any:
        """`a*y + x @ y`, or of tall matrices `a*y + y @ x`, of matrices and their symmetric polynomials."""
        _, rows, cols = y.shape
        left, right = (y, polynomial) if rows > cols else (polynomial, y)
        tiles, processors = self._machine(y)
        tile = chosen(tiles, processors, [tile.count(rows, cols) for tile in tiles])
        return self._launch(
            left, right, y, y.new_empty(tuple(y.shape)), tile, min(rows, cols), (False, True), False, a, 1.0
        )

    def _half(self, x: Any, added: Any, out: Any, down: bool, share: float = 0.0, factor: float = 1.0) -> Any:
        """A product of `x` and its transpose, or down its columns of its transpose and itself."""
        tiles, processors = self._machine(x)
        square = [tile for tile in tiles if tile.high == tile.wide]
        side, depth = out.shape[-1], x.shape[-2 if down else -1]
        tile = chosen(square, processors, [count_half(tile, side) for tile in square])
        return self._launch(x, x, added, out, tile, depth, (down, down), True, share, factor)

    def _machine(self, x: Any) -> tuple[Sequence[Tile], int]:
        tiles, processors = machine(x.device, str(x.dtype).removeprefix("torch."))
        return self._tiles or tiles, processors

    def _launch(
        self, left: Any, right: Any, added: Any, out: Any, tile: Tile, depth: int, down: tuple[bool, bool], half: bool,
        share: float, factor: float,
    ) -> Any:  # fmt: skip
        """Writes products to `out`, and returns it. The terms of the factors that are `down` lie down their columns."""
        batch, height, width = out.shape
        if not out.numel():
            return out
        left, right, added = (None if x is None else x.contiguous() for x in (left, right, added))
        factors = _described(left, right, tile, down) if tile.described else None
        count = count_half(tile, height) if half else tile.count(height, width)
        options = {k: v for k, v in tile.constants.items() if k != "PARTS"}
        options |= {"LEFT_DOWN": down[0], "RIGHT_DOWN": down[1], "HALF": half, "ADDS": added is not None}
        options |= {"ALL": not (height % tile.high or width % tile.wide), "EVEN": not depth % tile.deep}
        options |= {"DESCRIBED": factors is not None, "EMULATED": out.device.type == "cpu"}
        options |= {"num_warps": tile.warps, "num_stages": tile.stages, "enable_fp_fusion": False}
        with current(out.device, None):
            try:
                self._kernel[(batch * count,)](
                    *(factors or (left, right)), added, out, height, width, depth, share, factor, **options
                )
            except compiler_errors() as error:
                raise BackendUnavailable(refusal("newton_schulz", out.device, error)) from error
        return out


def count_half(tile: Tile, side: int) -> int:
    """The number of square tiles on and below the diagonal."""
    across = -(-side // tile.high)
    return across * (across + 1) // 2


def chosen(tiles: Sequence[Tile], processors: int, counts: Sequence[int]) -> Tile:
    """The largest tile of which a matrix has enough for the processors, else the smallest."""
    enough = (tile for tile, count in zip(tiles, counts, strict=True) if count * _SHARED >= processors)
    return next(enough, tiles[-1])


def _described(left: Any, right: Any, tile: Tile, down: tuple[bool, bool]) -> tuple[Any, Any] | None:
    """The factors as descriptors for the device's copies; None where they are not at multiples of 16 bytes."""
    try:
        from triton.tools.tensor_descriptor import TensorDescriptor
    except ImportError:  # before Triton 3.4
        return None
    if any(x.data_ptr() % 16 or x.shape[-1] * x.element_size() % 16 or not x.numel() for x in (left, right)):
        return None
    one, other = (
        TensorDescriptor.from_tensor(x, [1, tile.deep, lines] if turned else [1, lines, tile.deep])
        for x, lines, turned in zip((left, right), (tile.high, tile.wide), down, strict=True)
    )
    return one, other
