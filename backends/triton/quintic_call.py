"""Calls of the products of `newton_schulz`: one launch for each product of a stack of matrices.

The kind of a product decides its tiles, and how many matrices go into a stack.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rulec.backend.capabilities import WORTH_HALVING as _WORTH_HALVING
from rulec.errors import BackendUnavailable
from rulec.language.expr.newton_schulz import product_counts
from rulec.language.expr.static import DIRECT

from .memory import Launcher, current
from .product import Tile, machine
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

    def stack_size(
        self, device: Any, dtype: str, rows: int, cols: int, count: int, most: int, form: str = DIRECT
    ) -> int:  # fmt: skip
        """How many of `count` matrices go into a stack of `most` elements, to fill the device's processors."""
        return stack_size(rows, cols, count, most // (rows * cols), *self._machine(device, dtype), form)

    def divided(self, y: Any, norms: Any, out: Any = None) -> Any:
        """Each matrix over its norm, in one pass; `norms` are `(batch, 1, 1)`."""
        out = _room(out, y, y.shape)
        if not out.numel():
            return out
        y, size = y.contiguous(), out[0].numel()
        kind = out.device, y.dtype, norms.dtype
        launcher = self._dividers.get(kind)
        if launcher is None:
            constants = {"BLOCK": _DIVIDED, "EMULATED": out.device.type == "cpu", "num_warps": _WARPS}
            launcher = Launcher(self._dividing, constants | {"enable_fp_fusion": False})
            self._dividers[kind] = launcher
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

    def multiplied(self, x: Any, polynomial: Any, a: float, out: Any = None) -> Any:
        """`a*x + x @ p` of symmetric matrices that commute, exactly symmetric: the kernel of `polynomial`."""
        return self._launch(x, polynomial, x, _room(out, x, x.shape), polynomial_kind(x.shape[-1]), a)

    def following(self, y: Any, polynomial: Any, a: float, out: Any = None) -> Any:
        """`a*y + x @ y`, or of tall matrices `a*y + y @ x`, of matrices and their symmetric polynomials."""
        _, rows, cols = y.shape
        left, right = (y, polynomial) if rows > cols else (polynomial, y)
        return self._launch(left, right, y, _room(out, y, y.shape), following_kind(rows, cols), a)

    def _machine(self, device: Any, dtype: str) -> tuple[Sequence[Tile], int]:
        tiles, processors = machine(device, dtype)
        return self._tiles or tiles, processors

    def _new_work(self, kind: Kind, out: Any) -> Work:
        """What is known of all launches of a kind, found once."""
        tile = kind.tile(*self._machine(out.device, str(out.dtype).removeprefix("torch.")))
        work = Work(self._kernel, kind, tile, emulated=out.device.type == "cpu")
        self._works[kind, out.device, out.dtype] = work
        return work

    def _launch(
        self, left: Any, right: Any, added: Any, out: Any, kind: Kind, share: float = 0.0, factor: float = 1.0
    ) -> Any:
        """Writes `share * added + factor * left @ right` to `out`, and returns it."""
        if 0 in out.shape:
            return out
        left, right = left.contiguous(), right.contiguous()
        added = None if added is None else added.contiguous()
        work = self._works.get((kind, out.device, out.dtype)) or self._new_work(kind, out)
        with current(out.device, None):
            try:
                work.run(left, right, added, out, share, factor)
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
        self._count, self._describes = kind.count(tile), tile.described and _describes()
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
        kind, first, second = self.kind, left.data_ptr(), right.data_ptr()
        factors = self._described(left, first, right, second) if self._describes else None
        arguments = *(factors or (left, right)), added, out, kind.height, kind.width, kind.depth, share, factor
        added_at = 0 if added is None else added.data_ptr()
        aligned = first & 15, second & 15, added_at & 15, out.data_ptr() & 15
        self._launchers[factors is not None].run(out.shape[0] * self._count, arguments, aligned)

    def _described(self, left: Any, left_at: int, right: Any, right_at: int) -> tuple[Any, Any] | None:
        """The factors at their addresses as descriptors for the device's copies; None where either has none.

        The interpreter reads the tensors themselves.
        """
        first, second = self._blocks
        if self.emulated:
            one, other = (_new_descriptor(x, x.data_ptr(), x.dtype, x.shape, b)
                          for x, b in ((left, first), (right, second)))  # fmt: skip
        else:
            one = _remembered(left_at, left.dtype, left.shape, first)
            other = _remembered(right_at, right.dtype, right.shape, second)
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


#: The iterations that are most usual.
_ITERATIONS = 5

#: So many processors need one tile of a matrix among them: a stack has several matrices.
_SHARED = 4


@dataclass(frozen=True, eq=False)
class Kind:
    """A product of matrices of one shape: `height` by `width`, of sums of `depth` terms. There is one object of each.

    Terms of the factors that are `down` lie down their columns. Of a symmetric product one `half` is computed. What
    `adds` is added to a matrix.
    """

    height: int
    width: int
    depth: int
    down: tuple[bool, bool]
    half: bool
    adds: bool

    def count(self, tile: Tile) -> int:
        """The number of tiles of a matrix."""
        return count_half(tile, self.height) if self.half else tile.count(self.height, self.width)

    def tile(self, tiles: Sequence[Tile], processors: int) -> Tile:
        """The largest tile of which a matrix has enough for the processors, else the smallest."""
        fitting = [tile for tile in tiles if tile.high == tile.wide or not self.half]
        enough = (tile for tile in fitting if self.count(tile) * _SHARED >= processors)
        return tuned(next(enough, fitting[-1]), self.half, self.adds)


def tuned(tile: Tile, half: bool, adds: bool) -> Tile:
    """The tile with the stages that a kind of product was fastest with on an H200, where it has descriptors.

    A processor has no room for two such tiles. Products that are written twice want four stages.
    """
    whole = tile.described and adds and not half
    return replace(tile, stages=min(tile.stages, 3)) if whole else tile


def count_half(tile: Tile, side: int) -> int:
    """The number of square tiles on and below the diagonal."""
    across = -(-side // tile.high)
    return across * (across + 1) // 2


@functools.cache
def gram_kind(rows: int, cols: int) -> Kind:
    """The product of a matrix and its transpose, with the shorter side twice."""
    side, down = min(rows, cols), rows > cols
    return Kind(side, side, max(rows, cols), (down, down), half=True, adds=False)


@functools.cache
def polynomial_kind(side: int) -> Kind:
    """The square of a symmetric matrix, and the matrix."""
    return Kind(side, side, side, (False, False), half=True, adds=True)


@functools.cache
def following_kind(rows: int, cols: int) -> Kind:
    """The product of a matrix and a symmetric one of its shorter side, and the matrix."""
    return Kind(rows, cols, min(rows, cols), (False, True), half=False, adds=True)


def kinds(rows: int, cols: int) -> tuple[Kind, Kind, Kind]:
    """The products of an iteration: of Gram matrices, of other symmetric matrices, and of the matrix itself."""
    return gram_kind(rows, cols), polynomial_kind(min(rows, cols)), following_kind(rows, cols)


def fill(kind: Kind, tile: Tile, processors: int, stack: int) -> float:
    """The share of processors with a tile, over all waves of a launch."""
    count = stack * kind.count(tile)
    return count / (_waves(count, processors) * processors)


def stack_size(
    rows: int, cols: int, count: int, most: int, tiles: Sequence[Tile], processors: int, form: str = DIRECT
) -> int:  # fmt: skip
    """How many of `count` matrices go into a stack, `most` or fewer: as many as take the least time in all.

    In a wave each processor computes one tile, so a stack takes as long as a whole number of waves. The products are
    those of five iterations in this form, for only a step knows their number.
    """
    chosen = [(kind, kind.tile(tiles, processors)) for kind in kinds(rows, cols)]
    numbers = product_counts(rows, cols, _ITERATIONS, form)
    works = [
        (kind.count(tile), number * tile.high * tile.wide * kind.depth)
        for number, (kind, tile) in zip(numbers, chosen, strict=True)
    ]

    def time(stack: int) -> int:
        return sum(_waves(stack * tiles_of_one, processors) * terms for tiles_of_one, terms in works)

    def whole(stack: int) -> int:
        return count // stack * time(stack) + time(count % stack)

    sizes = range(max(1, min(count, most)), 0, -1)
    return min(sizes, key=whole)


def _waves(count: int, processors: int) -> int:
    return -(-count // processors)
