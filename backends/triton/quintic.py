"""Prints the products of `newton_schulz`: of stacks of matrices in 16 bits, summed in float32 and rounded once.

A program of the grid computes one tile of one product. Of a symmetric result only tiles on and below the diagonal are
computed, and each is also written mirrored. A matrix has the same bits in every stack.
"""

from __future__ import annotations

from rulec.backend.capabilities import DTYPES
from rulec.errors import BackendUnsupported

from .ops import rounded
from .words import source_text, words_used

_PLACES = '''\
@triton.jit
def grouped(number, deep, across, TALL: tl.constexpr):
    """The row and the column of a tile: TALL below one another come before those beside them."""
    first = number // (TALL * across) * TALL
    number = number % (TALL * across)
    high = tl.minimum(deep - first, TALL)
    return first + number % high, number // high


@triton.jit
def in_triangle(number, deep, TALL: tl.constexpr):
    """The row and the column of a tile on or below the diagonal of `deep` by `deep` tiles.

    A long row and a short one are side by side in one line: all lines have the same length.
    """
    odd = deep % 2
    line, place = grouped(number, (deep + odd) // 2, deep + 1 - odd, TALL)
    long = deep - line
    return tl.where(place < long, long - 1, line - odd), tl.where(place < long, place, place - long)
'''

_BLOCK = '''\
@triton.jit
def block(
    factor, at, inside, matrix, edge, first, term, depth, LINES: tl.constexpr, DEEP: tl.constexpr, DOWN: tl.constexpr,
    RIGHT: tl.constexpr, DESCRIBED: tl.constexpr, ALL: tl.constexpr, EVEN: tl.constexpr, EMULATED: tl.constexpr,
):
    """LINES of a factor from `edge` on, DEEP terms of each from `first` on: zeros beyond the ends of the matrix.

    Terms follow one another along rows, in the RIGHT factor down columns. A factor that is DESCRIBED knows its own
    ends.
    """
    if DESCRIBED:
        if DOWN:
            x = tl.reshape(factor.load([matrix, first, edge]), (DEEP, LINES))
        else:
            x = tl.reshape(factor.load([matrix, edge, first]), (LINES, DEEP))
        if DOWN != RIGHT:
            x = tl.trans(x)
    elif ALL and EVEN:
        x = tl.load(at)
    elif ALL:
        x = tl.load(at, mask=term < depth - first, other=0.0)
    elif EVEN:
        x = tl.load(at, mask=inside, other=0.0)
    else:
        x = tl.load(at, mask=inside & (term < depth - first), other=0.0)
    if EMULATED:  # the interpreter's product takes bfloat16 for integers
        x = x.to(tl.float32)
    return x


@triton.jit
def placed(factor, matrix, edge, size, depth, line, term, DOWN: tl.constexpr, DESCRIBED: tl.constexpr):
    """The addresses of a factor's first block, unless it is DESCRIBED, and whether its lines exist."""
    if DESCRIBED:
        at = 0
    elif DOWN:
        at = factor + (matrix.to(tl.int64) * depth * size + edge) + (term * size + line)
    else:
        at = factor + (matrix.to(tl.int64) * size + edge) * depth + (line * depth + term)
    return at, line < size - edge
'''

_SUMS = '''\
@triton.jit
def sums(
    left, right, matrix, top, start, height, width, depth, HIGH: tl.constexpr, WIDE: tl.constexpr, DEEP: tl.constexpr,
    LEFT_DOWN: tl.constexpr, RIGHT_DOWN: tl.constexpr, DESCRIBED: tl.constexpr, ALL: tl.constexpr, EVEN: tl.constexpr,
    EMULATED: tl.constexpr,
):
    """The tile at row `top`, column `start` of a product of `height` by `width`: sums of `depth` terms in float32.

    The terms for a row lie along a row of the `left` factor, or LEFT_DOWN down a column; so do those of the `right`
    factor for a column.
    """
    row, along = tl.arange(0, HIGH)[:, None], tl.arange(0, DEEP)[None, :]
    column, down = tl.arange(0, WIDE)[None, :], tl.arange(0, DEEP)[:, None]
    left_at, row_inside = placed(left, matrix, top, height, depth, row, along, LEFT_DOWN, DESCRIBED)
    right_at, column_inside = placed(right, matrix, start, width, depth, column, down, RIGHT_DOWN, DESCRIBED)
    total = tl.zeros((HIGH, WIDE), tl.float32)
    for first in range(0, depth, DEEP):
        x = block(
            left, left_at, row_inside, matrix, top, first, along, depth, HIGH, DEEP, LEFT_DOWN, False, DESCRIBED, ALL,
            EVEN, EMULATED,
        )
        y = block(
            right, right_at, column_inside, matrix, start, first, down, depth, WIDE, DEEP, RIGHT_DOWN, True, DESCRIBED,
            ALL, EVEN, EMULATED,
        )
        total = tl.dot(x, y, total)
        if not DESCRIBED:
            left_at += DEEP * height if LEFT_DOWN else DEEP
            right_at += DEEP * width if RIGHT_DOWN else DEEP
    return total
'''

_WRITTEN = '''\
@triton.jit
def combined(
    tile, added, top, start, height, width, share, factor, ADDS: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr,
    ALL: tl.constexpr, EMULATED: tl.constexpr,
):
    """The tile, with ADDS `share` of another matrix added to `factor` of it, rounded."""
    if ADDS:
        down, along = tl.arange(0, HIGH)[:, None], tl.arange(0, WIDE)[None, :]
        inside = None if ALL else (down < height - top) & (along < width - start)
        other = tl.load(added + (top.to(tl.int64) * width + start) + (down * width + along), mask=inside)
        tile = factor * tile + share * other.to(tl.float32)
    return ROUNDED


@triton.jit
def put(out, tile, top, start, height, width, HIGH: tl.constexpr, WIDE: tl.constexpr, ALL: tl.constexpr):
    """Writes a tile."""
    down, along = tl.arange(0, HIGH)[:, None], tl.arange(0, WIDE)[None, :]
    inside = None if ALL else (down < height - top) & (along < width - start)
    tl.store(out + (top.to(tl.int64) * width + start) + (down * width + along), tile, mask=inside)


@triton.jit
def put_whole(
    tile, added, out, top, start, height, width, share, factor, ADDS: tl.constexpr, HIGH: tl.constexpr,
    WIDE: tl.constexpr, ALL: tl.constexpr, EMULATED: tl.constexpr,
):
    """Writes a tile; one that is wider than high by halves, whose elements fit into registers."""
    if WIDE > HIGH:
        one, other = tl.split(tl.permute(tl.reshape(tile, (HIGH, 2, WIDE // 2)), (0, 2, 1)))
        put_whole(one, added, out, top, start, height, width, share, factor, ADDS, HIGH, WIDE // 2, ALL, EMULATED)
        start += WIDE // 2
        put_whole(other, added, out, top, start, height, width, share, factor, ADDS, HIGH, WIDE // 2, ALL, EMULATED)
    else:
        tile = combined(tile, added, top, start, height, width, share, factor, ADDS, HIGH, WIDE, ALL, EMULATED)
        put(out, tile, top, start, height, width, HIGH, WIDE, ALL)


@triton.jit
def put_half(
    tile, added, out, top, start, side, share, factor, ADDS: tl.constexpr, HIGH: tl.constexpr, ALL: tl.constexpr,
    EMULATED: tl.constexpr,
):
    """Writes a tile of a symmetric matrix, and its mirror image; of one on the diagonal the part below that, twice."""
    tile = combined(tile, added, top, start, side, side, share, factor, ADDS, HIGH, HIGH, ALL, EMULATED)
    mirrored = tl.trans(tile)
    if top == start:
        below = tl.arange(0, HIGH)[:, None] >= tl.arange(0, HIGH)[None, :]
        put(out, tl.where(below, tile, mirrored), top, start, side, side, HIGH, HIGH, ALL)
    else:
        put(out, tile, top, start, side, side, HIGH, HIGH, ALL)
        put(out, mirrored, start, top, side, side, HIGH, HIGH, ALL)
'''

_PRODUCT = '''\
@triton.jit
def product(
    left, right, added, out, height, width, depth, share, factor, HALF: tl.constexpr, ADDS: tl.constexpr,
    HIGH: tl.constexpr, WIDE: tl.constexpr, DEEP: tl.constexpr, TALL: tl.constexpr, LEFT_DOWN: tl.constexpr,
    RIGHT_DOWN: tl.constexpr, DESCRIBED: tl.constexpr, ALL: tl.constexpr, EVEN: tl.constexpr, EMULATED: tl.constexpr,
):
    """One tile of `left @ right`, or with ADDS of `share * added + factor * left @ right`, of one matrix of a stack.

    A result that is symmetric is computed by HALF: each tile below the diagonal is written twice. Tiles are HIGH by
    WIDE, the same of such a result; ALL says that all are whole, EVEN that `depth` is a multiple of DEEP.
    """
    deep, across = tl.cdiv(height, HIGH), tl.cdiv(width, WIDE)
    count = deep * (deep + 1) // 2 if HALF else deep * across
    matrix, number = tl.program_id(0) // count, tl.program_id(0) % count
    row, column = in_triangle(number, deep, TALL) if HALF else grouped(number, deep, across, TALL)
    top, start = row * HIGH, column * WIDE
    tile = sums(
        left, right, matrix, top, start, height, width, depth, HIGH, WIDE, DEEP, LEFT_DOWN, RIGHT_DOWN, DESCRIBED, ALL,
        EVEN, EMULATED,
    )
    out += matrix.to(tl.int64) * height * width
    if ADDS:
        added += matrix.to(tl.int64) * height * width
    if HALF:
        put_half(tile, added, out, top, start, height, share, factor, ADDS, HIGH, ALL, EMULATED)
    else:
        put_whole(tile, added, out, top, start, height, width, share, factor, ADDS, HIGH, WIDE, ALL, EMULATED)
'''

_DIVIDED = '''\
@triton.jit
def divided(y, norms, out, size, BLOCK: tl.constexpr, EMULATED: tl.constexpr):
    """BLOCK elements of one matrix of a stack, of `size` elements each, over the norm of that matrix."""
    count = tl.cdiv(size, BLOCK)
    matrix, number = tl.program_id(0) // count, tl.program_id(0) % count
    at = matrix.to(tl.int64) * size + number * BLOCK + tl.arange(0, BLOCK)
    inside = number * BLOCK + tl.arange(0, BLOCK) < size
    norm = tl.load(norms + matrix).to(tl.float32)
    value = tl.load(y + at, mask=inside, other=0.0).to(tl.float32)
    quotient = tl.div_rn(value, tl.full((BLOCK,), 1.0, tl.float32) * norm)
    tl.store(out + at, ROUNDED, mask=inside)
'''


def quintic_source(dtype: str) -> str:
    """The whole file: the kernels `product` and `divided`, of matrices in `dtype`.

    BackendUnsupported for a dtype not of 16 bits.
    """
    if dtype not in DTYPES:
        raise BackendUnsupported("triton", f"products of matrices in {dtype}", "newton_schulz")
    written = _WRITTEN.replace("ROUNDED", rounded("tile", dtype, "float32"))
    divided = _DIVIDED.replace("ROUNDED", rounded("quotient", dtype, "float32"))
    title = f"The products of newton_schulz in {dtype}, by the triton backend. Printed by rulec."
    return source_text(title, [*words_used(written), _PLACES, _BLOCK, _SUMS, written, _PRODUCT, divided])
