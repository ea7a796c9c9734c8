"""Calls of the products of `newton_schulz`: one launch for each product of a stack of matrices."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rulec.backend.quintic import WORTH_HALVING as _WORTH_HALVING
from rulec.errors import BackendUnavailable

from .launcher import Launcher
from .memory import current
from .product import Tile, machine
from .quintic_kinds import Kind, count_half, following_kind, gram_kind, polynomial_kind, stack_size
from .work import compiler_errors, refusal

__all__ = ["QuinticProducts", "count_half"]

#: The elements of a program that divides by norms, and its warps: each thread has two accesses of 16 bytes.
_DIVIDED, _WARPS = 2048, 4

#: Descriptors that are remembered: more than a step of a large model has.
_DESCRIPTORS = 1 << 12


class QuinticProducts:
    """The products of `newton_schulz` for stacks `(batch, rows, cols)` of one dtype on one GPU.

    Stacks in another memory order than that of their shape are copied. The tile depends on the shape of a matrix and on
    the GPU alone, so the bits of a matrix do not depend on its neighbours. Products with descriptors are launched by
    their compiled kernels from the second time on.
    """

    def __init__(self, kernel: Any, tiles: Sequence[Tile] = (), dividing: Any = None) -> None:
        """`kernel` and `dividing` are `product` and `divided` of a source text. `tiles` replace the device's."""
        self._kernel, self._tiles, self._dividing = kernel, tiles, dividing
        self._works: dict[tuple[Kind, Any, Any], Work] = {}
        self._dividers: dict[Any, Launcher] = {}

    def pays(self, rows: int, cols: int) -> bool:
        """Whether matrices are large enough."""
        return min(rows, cols) >= _WORTH_HALVING

    def stack_size(self, device: Any, dtype: str, rows: int, cols: int, count: int, most: int) -> int:
        """How many of `count` matrices go into a stack of `most` elements, to fill the device's processors."""
        return stack_size(rows, cols, count, most // (rows * cols), *self._machine(device, dtype))

    def divided(self, y: Any, norms: Any) -> Any:
        """Each matrix over its norm, in one pass; `norms` are `(batch, 1, 1)`."""
        out = y.new_empty(tuple(y.shape))
        if not out.numel():
            return out
        y, size = y.contiguous(), out[0].numel()
        launcher = self._dividers.get(out.device)
        if launcher is None:
            constants = {"BLOCK": _DIVIDED, "EMULATED": out.device.type == "cpu", "num_warps": _WARPS}
            launcher = Launcher(self._dividing, constants | {"enable_fp_fusion": False})
            self._dividers[out.device] = launcher
        aligned = y.data_ptr() & 15, norms.data_ptr() & 15, out.data_ptr() & 15
        with current(out.device, None):
            launcher.run(len(out) * -(-size // _DIVIDED), (y, norms, out, size), (size, *aligned))
        return out

    def gram(self, y: Any, out: Any = None) -> Any:
        """The products of each matrix and its transpose, with the shorter side twice: exactly symmetric."""
        batch, rows, cols = y.shape
        kind = gram_kind(rows, cols)
        return self._launch(y, y, None, _room(out, y, (batch, kind.height, kind.width)), kind)

    def polynomial(self, gram: Any, b: float, c: float, out: Any = None) -> Any:
        """`b*x + c*x @ x` of symmetric matrices, exactly symmetric."""
        return self._launch(gram, gram, gram, _room(out, gram, gram.shape), polynomial_kind(gram.shape[-1]), b, c)

    def following(self, y: Any, polynomial: Any, a: float, out: Any = None) -> Any:
        """`a*y + x @ y`, or of tall matrices `a*y + y @ x`, of matrices and their symmetric polynomials."""
        _, rows, cols = y.shape
        left, right = (y, polynomial) if rows > cols else (polynomial, y)
        return self._launch(left, right, y, _room(out, y, y.shape), following_kind(rows, cols), a)

    def _machine(self, device: Any, dtype: str) -> tuple[Sequence[Tile], int]:
        tiles, processors = machine(device, dtype)
        return self._tiles or tiles, processors

    def _work(self, kind: Kind, out: Any) -> Work:
        """What is known of all launches of a kind, found once."""
        work = self._works.get((kind, out.device, out.dtype))
        if work is None:
            tile = kind.tile(*self._machine(out.device, str(out.dtype).removeprefix("torch.")))
            work = Work(self._kernel, kind, tile, emulated=out.device.type == "cpu")
            self._works[kind, out.device, out.dtype] = work
        return work

    def _launch(
        self, left: Any, right: Any, added: Any, out: Any, kind: Kind, share: float = 0.0, factor: float = 1.0
    ) -> Any:
        """Writes `share * added + factor * left @ right` to `out`, and returns it."""
        if not out.numel():
            return out
        left, right = left.contiguous(), right.contiguous()
        added = None if added is None else added.contiguous()
        with current(out.device, None):
            try:
                self._work(kind, out).run(left, right, added, out, share, factor)
            except compiler_errors() as error:
                raise BackendUnavailable(refusal("newton_schulz", out.device, error)) from error
        return out


def _room(out: Any, like: Any, shape: Sequence[int]) -> Any:
    """The memory given for a result, or new memory where that does not lie in the order of its shape."""
    return out if out is not None and out.is_contiguous() else like.new_empty(tuple(shape))


@dataclass
class Work:
    """The launches of one kind of product on one device."""

    kernel: Any
    kind: Kind
    tile: Tile
    emulated: bool

    def __post_init__(self) -> None:
        kind, tile = self.kind, self.tile
        self._count = kind.count(tile)
        self._blocks = [
            (1, tile.deep, lines) if down else (1, lines, tile.deep)
            for lines, down in zip((tile.high, tile.wide), kind.down, strict=True)
        ]
        constants = {k: v for k, v in tile.constants.items() if k != "PARTS"} | {
            "HALF": kind.half, "ADDS": kind.adds, "LEFT_DOWN": kind.down[0], "RIGHT_DOWN": kind.down[1],
            "ALL": not (kind.height % tile.high or kind.width % tile.wide), "EVEN": not kind.depth % tile.deep,
            "EMULATED": self.emulated,
        }  # fmt: skip
        constants |= {"num_warps": tile.warps, "num_stages": tile.stages, "enable_fp_fusion": False}
        self._launchers = [Launcher(self.kernel, constants | {"DESCRIBED": described}) for described in (False, True)]

    def run(self, left: Any, right: Any, added: Any, out: Any, share: float, factor: float) -> None:
        """One launch."""
        kind = self.kind
        factors = self._described(left, right)
        arguments = *(factors or (left, right)), added, out, kind.height, kind.width, kind.depth, share, factor
        added_at = 0 if added is None else added.data_ptr()
        aligned = left.data_ptr() & 15, right.data_ptr() & 15, added_at & 15, out.data_ptr() & 15
        self._launchers[factors is not None].run(len(out) * self._count, arguments, aligned)

    def _described(self, left: Any, right: Any) -> tuple[Any, Any] | None:
        """The factors as descriptors for the device's copies; None where either has none."""
        if not self.tile.described or not _describes():
            return None
        first, second = self._blocks
        one = _descriptor(left, first, self.emulated)
        other = one if right is left and first == second else _descriptor(right, second, self.emulated)
        return None if one is None or other is None else (one, other)


@functools.cache
def _describes() -> bool:
    """Whether this version of Triton has descriptors: from 3.4 on."""
    try:
        from triton.tools import tensor_descriptor  # noqa: F401
    except ImportError:
        return False
    return True


class Memory:
    """Memory at an address, as a descriptor sees it: a descriptor that is remembered keeps no tensor alive."""

    def __init__(self, address: int, dtype: Any) -> None:
        self._address, self.dtype = address, dtype

    def data_ptr(self) -> int:
        """The address."""
        return self._address


def _descriptor(x: Any, block: tuple[int, int, int], emulated: bool) -> Any:
    """A descriptor of a contiguous stack, for blocks of this shape; None for one that has none.

    The interpreter reads the tensor itself.
    """
    if emulated:
        return _new_descriptor(x, x.data_ptr(), x.dtype, x.shape, block)
    return _remembered(x.data_ptr(), x.dtype, x.shape, block)


@functools.lru_cache(maxsize=_DESCRIPTORS)
def _remembered(address: int, dtype: Any, shape: Sequence[int], block: tuple[int, int, int]) -> Any:
    return _new_descriptor(Memory(address, dtype), address, dtype, shape, block)


def _new_descriptor(base: Any, address: int, dtype: Any, shape: Sequence[int], block: tuple[int, int, int]) -> Any:
    """None where lines do not begin at multiples of 16 bytes."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    batch, rows, cols = shape
    if address % 16 or cols * dtype.itemsize % 16 or not batch * rows * cols:
        return None
    return TensorDescriptor(base, [batch, rows, cols], [rows * cols, cols, 1], [*block])
