"""Adafactor by the triton backend: p:f32 g:f32 r:f32 c:f32. Printed by rulec.

Adafactor: Second moments as the product of a row and a column, and steps relative to the size of the parameter.
Adafactor: Adaptive Learning Rates with Sublinear Memory Cost (Shazeer, Stern, 2018)
https://arxiv.org/abs/1804.04235

    rho = t**beta2_decay
    if ndim >= 2:
      r = r + rho*(mean(g**2, per="row") - r)
      c = c + rho*(mean(g**2, per="col") - c)
      a = rsqrt(r/maximum(mean(r, per="matrix"), eps1))
      b = rsqrt(c)
      u = g*minimum(a*b, 1/eps1)
    else:
      v = v + rho*(g**2 - v)
      u = g/sqrt(maximum(v, eps1**2))
    alpha = maximum(eps2, rms(p, per="tensor"))*minimum(lr, 1/sqrt(t))
    p = p - lr*weight_decay*p
    p = p - alpha/maximum(1, rms(u, per="tensor")/d)*u
"""

import triton
import triton.language as tl


@triton.jit
def stage_0_tiles(
    matrix, left, top, bottom, batch, height, width, p_at, g_at, slots, sum_g_squared_row_at, scale,
    ALL: tl.constexpr, MATRICES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Rows `top` to `bottom` of a column of tiles, in float32: ALL of each tile, 16 bytes at a time,
    or those of its elements that are in the matrix, at any address.
    """
    p_at = tl.multiple_of(p_at.to(tl.pointer_type(tl.float32)), 16 if ALL else 1)
    g_at = tl.multiple_of(g_at.to(tl.pointer_type(tl.float32)), 16 if ALL else 1)
    if scale is not None:
        unscale = tl.div_rn(1.0, tl.load(scale))
    if ALL:
        width = width // VECTOR * VECTOR
    plane = tl.arange(0, MATRICES)[:, None, None]
    down = tl.arange(0, ROWS)[None, :, None]
    along = tl.arange(0, COLUMNS)[None, None, :]
    rows = plane * height.to(tl.int32) + down
    columns = plane * width.to(tl.int32) + along
    beside = None if ALL else (plane < batch - matrix) & (along < width - left)
    i = rows * width.to(tl.int32) + along
    sum_g_squared_row_at = slots + sum_g_squared_row_at + left // COLUMNS * batch * height
    sum_g_squared_col = tl.full((MATRICES, ROWS, COLUMNS), 0.0, tl.float64)
    sum_p_squared = tl.full((MATRICES, ROWS, 1), 0.0, tl.float64)
    for first in range(top, bottom, ROWS):
        line = matrix * height + (first if ALL else tl.minimum(first, height))
        start = line * width + left
        below = None if ALL else (plane < batch - matrix) & (down < bottom - first)
        inside = None if ALL else beside & below
        p = tl.load(p_at + start + i, mask=inside)
        g = tl.load(g_at + start + i, mask=inside)
        if scale is not None:
            g = g * unscale
        x0 = g * g
        tl.store(sum_g_squared_row_at + line + rows, tl.sum((x0 if ALL else tl.where(inside, x0, 0.0)).to(tl.float64), 2, True), mask=below)
        sum_g_squared_col = sum_g_squared_col + (x0 if ALL else tl.where(inside, x0, 0.0)).to(tl.float64)
        sum_p_squared = sum_p_squared + tl.sum((p * p if ALL else tl.where(inside, p * p, 0.0)).to(tl.float64), 2, True)
    return tl.sum(sum_g_squared_col, 1, True), tl.sum(sum_p_squared)


@triton.jit
def stage_0_chunk(
    number, batch, height, width, lines, across, deep, known, p_at, g_at, slots, sum_g_squared_row_at,
    scale, MATRICES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """One chunk of a tensor that is cut into tiles of this shape; WIDE ones are taken 16 bytes at a time."""
    left, piece, matrix = number % across, number // across % deep, number // (across * deep)
    left, matrix = left.to(tl.int64) * COLUMNS, matrix.to(tl.int64) * MATRICES
    top = piece.to(tl.int64) * lines
    bottom = tl.minimum(top + lines, height)
    aligned = ((p_at | g_at) % 16 == 0) & (width % VECTOR == 0)
    whole = aligned & (left + COLUMNS <= width) & (matrix + MATRICES <= batch)
    middle = tl.where(whole, top + (bottom - top) // ROWS * ROWS, top) if WIDE else top
    sum_g_squared_col_rest, sum_p_squared_rest = stage_0_tiles(
        matrix, left, middle, bottom, batch, height, width, p_at, g_at, slots, sum_g_squared_row_at, scale,
        False, MATRICES, ROWS // 2 if VECTOR == 8 and ROWS > 1 else ROWS, COLUMNS, VECTOR,
    )
    if WIDE:
        sum_g_squared_col, sum_p_squared = stage_0_tiles(
            matrix, left, top, middle, batch, height, width, p_at, g_at, slots, sum_g_squared_row_at, scale,
            True, MATRICES, ROWS, COLUMNS, VECTOR,
        )
    sum_g_squared_col = sum_g_squared_col + sum_g_squared_col_rest if WIDE else sum_g_squared_col_rest
    sum_p_squared = sum_p_squared + sum_p_squared_rest if WIDE else sum_p_squared_rest
    plane, along = tl.arange(0, MATRICES)[:, None, None], tl.arange(0, COLUMNS)[None, None, :]
    beside = (plane < batch - matrix) & (along < width - left)
    column = piece * batch * width + matrix * width + left + plane * width.to(tl.int32) + along
    tl.store(slots + tl.load(known + 8) + column, sum_g_squared_col, mask=beside)
    tl.store(slots + tl.load(known + 9) + number, sum_p_squared)


@triton.jit(do_not_specialize=["chunks", "known", "moving", "table", "stays", "scale", "slots"])
def stage_0(chunks, known, moving, table, stays, scale, slots, BLOCK: tl.constexpr, VECTOR: tl.constexpr):
    """One chunk of one tensor: stage 0 reduces to sum_g_squared_row, sum_g_squared_col, sum_p_squared per
    tensor.

    `chunks` has pairs of a tensor and one of its chunks. A line of `known` says how a tensor lies and is
    cut, and has addresses; one of `moving` its row of `table`, and the addresses that come with each call.
    """
    chunk = chunks + 2 * tl.program_id(0).to(tl.int64)
    tensor, number = tl.load(chunk).to(tl.int64), tl.load(chunk + 1)
    known += 11 * tensor
    moving += 2 * tensor
    row = tl.load(moving)
    batch, height, width = tl.load(known + 0), tl.load(known + 1), tl.load(known + 2)
    lines, tile = tl.load(known + 3), tl.load(known + 6)
    across, deep = tl.load(known + 4).to(tl.int32), tl.load(known + 5).to(tl.int32)
    sum_g_squared_row_at = tl.load(known + 7)
    p_at = tl.load(known + 10)
    g_at = tl.load(moving + 1)
    if tile == 0:
        stage_0_chunk(
            number, batch, height, width, lines, across, deep, known, p_at, g_at, slots, sum_g_squared_row_at,
            scale, 1, 1, BLOCK, True, VECTOR,
        )
    elif tile == 1:
        stage_0_chunk(
            number, batch, height, width, lines, across, deep, known, p_at, g_at, slots, sum_g_squared_row_at,
            scale, 1, BLOCK // (32 * VECTOR), 32 * VECTOR, True, VECTOR,
        )
    elif tile == 2:
        stage_0_chunk(
            number, batch, height, width, lines, across, deep, known, p_at, g_at, slots, sum_g_squared_row_at,
            scale, 1, BLOCK // 8, 8, False, VECTOR,
        )
    else:
        stage_0_chunk(
            number, batch, height, width, lines, across, deep, known, p_at, g_at, slots, sum_g_squared_row_at,
            scale, BLOCK // 64, 8, 8, False, VECTOR,
        )


@triton.jit
def stage_1_tiles(
    matrix, left, top, bottom, batch, height, width, g_at, a_at, b_at, one_over_eps1, scale,
    ALL: tl.constexpr, MATRICES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Rows `top` to `bottom` of a column of tiles, in float32: ALL of each tile, 16 bytes at a time,
    or those of its elements that are in the matrix, at any address.
    """
    g_at = tl.multiple_of(g_at.to(tl.pointer_type(tl.float32)), 16 if ALL else 1)
    a_at = a_at.to(tl.pointer_type(tl.float32))
    b_at = tl.multiple_of(b_at.to(tl.pointer_type(tl.float32)), 16 if ALL else 1)
    if scale is not None:
        unscale = tl.div_rn(1.0, tl.load(scale))
    if ALL:
        width = width // VECTOR * VECTOR
    plane = tl.arange(0, MATRICES)[:, None, None]
    down = tl.arange(0, ROWS)[None, :, None]
    along = tl.arange(0, COLUMNS)[None, None, :]
    rows = plane * height.to(tl.int32) + down
    columns = plane * width.to(tl.int32) + along
    beside = None if ALL else (plane < batch - matrix) & (along < width - left)
    i = rows * width.to(tl.int32) + along
    b = tl.load(b_at + matrix * width + left + columns, mask=beside)
    sum_u_squared = tl.full((MATRICES, ROWS, 1), 0.0, tl.float64)
    for first in range(top, bottom, ROWS):
        line = matrix * height + (first if ALL else tl.minimum(first, height))
        start = line * width + left
        below = None if ALL else (plane < batch - matrix) & (down < bottom - first)
        inside = None if ALL else beside & below
        a = tl.load(a_at + line + rows, mask=below)
        g = tl.load(g_at + start + i, mask=inside)
        if scale is not None:
            g = g * unscale
        u = g * tl.minimum(a * b, one_over_eps1, propagate_nan=tl.PropagateNan.ALL)
        sum_u_squared = sum_u_squared + tl.sum((u * u if ALL else tl.where(inside, u * u, 0.0)).to(tl.float64), 2, True)
    return tl.sum(sum_u_squared)


@triton.jit
def stage_1_chunk(
    number, batch, height, width, lines, across, deep, known, slots, g_at, a_at, b_at, one_over_eps1,
    scale, MATRICES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """One chunk of a tensor that is cut into tiles of this shape; WIDE ones are taken 16 bytes at a time."""
    left, piece, matrix = number % across, number // across % deep, number // (across * deep)
    left, matrix = left.to(tl.int64) * COLUMNS, matrix.to(tl.int64) * MATRICES
    top = piece.to(tl.int64) * lines
    bottom = tl.minimum(top + lines, height)
    aligned = ((g_at | b_at) % 16 == 0) & (width % VECTOR == 0)
    whole = aligned & (left + COLUMNS <= width) & (matrix + MATRICES <= batch)
    middle = tl.where(whole, top + (bottom - top) // ROWS * ROWS, top) if WIDE else top
    sum_u_squared_rest = stage_1_tiles(
        matrix, left, middle, bottom, batch, height, width, g_at, a_at, b_at, one_over_eps1, scale, False,
        MATRICES, ROWS // 2 if VECTOR == 8 and ROWS > 1 else ROWS, COLUMNS, VECTOR,
    )
    if WIDE:
        sum_u_squared = stage_1_tiles(
            matrix, left, top, middle, batch, height, width, g_at, a_at, b_at, one_over_eps1, scale, True,
            MATRICES, ROWS, COLUMNS, VECTOR,
        )
    sum_u_squared = sum_u_squared + sum_u_squared_rest if WIDE else sum_u_squared_rest
    tl.store(slots + tl.load(known + 7) + number, sum_u_squared)


@triton.jit(do_not_specialize=["chunks", "known", "moving", "table", "stays", "scale", "slots"])
def stage_1(chunks, known, moving, table, stays, scale, slots, BLOCK: tl.constexpr, VECTOR: tl.constexpr):
    """One chunk of one tensor: stage 1 reduces to sum_u_squared per tensor.

    `chunks` has pairs of a tensor and one of its chunks. A line of `known` says how a tensor lies and is
    cut, and has addresses; one of `moving` its row of `table`, and the addresses that come with each call.
    """
    chunk = chunks + 2 * tl.program_id(0).to(tl.int64)
    tensor, number = tl.load(chunk).to(tl.int64), tl.load(chunk + 1)
    known += 8 * tensor
    moving += 4 * tensor
    row = tl.load(moving)
    values = table + 11 * row
    batch, height, width = tl.load(known + 0), tl.load(known + 1), tl.load(known + 2)
    lines, tile = tl.load(known + 3), tl.load(known + 6)
    across, deep = tl.load(known + 4).to(tl.int32), tl.load(known + 5).to(tl.int32)
    g_at = tl.load(moving + 1)
    a_at = tl.load(moving + 2)
    b_at = tl.load(moving + 3)
    one_over_eps1 = tl.load(values + 8).to(tl.float32)
    if tile == 0:
        stage_1_chunk(
            number, batch, height, width, lines, across, deep, known, slots, g_at, a_at, b_at, one_over_eps1,
            scale, 1, 1, BLOCK, True, VECTOR,
        )
    elif tile == 1:
        stage_1_chunk(
            number, batch, height, width, lines, across, deep, known, slots, g_at, a_at, b_at, one_over_eps1,
            scale, 1, BLOCK // (32 * VECTOR), 32 * VECTOR, True, VECTOR,
        )
    elif tile == 2:
        stage_1_chunk(
            number, batch, height, width, lines, across, deep, known, slots, g_at, a_at, b_at, one_over_eps1,
            scale, 1, BLOCK // 8, 8, False, VECTOR,
        )
    else:
        stage_1_chunk(
            number, batch, height, width, lines, across, deep, known, slots, g_at, a_at, b_at, one_over_eps1,
            scale, BLOCK // 64, 8, 8, False, VECTOR,
        )


@triton.jit
def stage_2_tiles(
    matrix, left, top, bottom, batch, height, width, p_at, g_at, a_at, b_at, lr_weight_decay,
    one_over_eps1, p_new_factor, scale, stays, row, ALL: tl.constexpr, MATRICES: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, VECTOR: tl.constexpr,
):
    """Rows `top` to `bottom` of a column of tiles, in float32: ALL of each tile, 16 bytes at a time,
    or those of its elements that are in the matrix, at any address.
    """
    p_at = tl.multiple_of(p_at.to(tl.pointer_type(tl.float32)), 16 if ALL else 1)
    g_at = tl.multiple_of(g_at.to(tl.pointer_type(tl.float32)), 16 if ALL else 1)
    a_at = a_at.to(tl.pointer_type(tl.float32))
    b_at = tl.multiple_of(b_at.to(tl.pointer_type(tl.float32)), 16 if ALL else 1)
    if scale is not None:
        unscale = tl.div_rn(1.0, tl.load(scale))
    if stays is not None:
        write = tl.load(stays + row) == 0
    if ALL:
        width = width // VECTOR * VECTOR
    plane = tl.arange(0, MATRICES)[:, None, None]
    down = tl.arange(0, ROWS)[None, :, None]
    along = tl.arange(0, COLUMNS)[None, None, :]
    rows = plane * height.to(tl.int32) + down
    columns = plane * width.to(tl.int32) + along
    beside = None if ALL else (plane < batch - matrix) & (along < width - left)
    i = rows * width.to(tl.int32) + along
    b = tl.load(b_at + matrix * width + left + columns, mask=beside)
    for first in range(top, bottom, ROWS):
        line = matrix * height + (first if ALL else tl.minimum(first, height))
        start = line * width + left
        below = None if ALL else (plane < batch - matrix) & (down < bottom - first)
        inside = None if ALL else beside & below
        a = tl.load(a_at + line + rows, mask=below)
        p = tl.load(p_at + start + i, mask=inside)
        g = tl.load(g_at + start + i, mask=inside)
        if scale is not None:
            g = g * unscale
        p_new = p - lr_weight_decay * p
        u = g * tl.minimum(a * b, one_over_eps1, propagate_nan=tl.PropagateNan.ALL)
        p_new_ = p_new - p_new_factor * u
        writable = inside if stays is None else (write if ALL else inside & write)
        tl.store(p_at + start + i, p_new_, mask=writable)


@triton.jit
def stage_2_chunk(
    number, batch, height, width, lines, across, deep, p_at, g_at, a_at, b_at, lr_weight_decay,
    one_over_eps1, p_new_factor, scale, stays, row, MATRICES: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, WIDE: tl.constexpr, VECTOR: tl.constexpr,
):
    """One chunk of a tensor that is cut into tiles of this shape; WIDE ones are taken 16 bytes at a time."""
    left, piece, matrix = number % across, number // across % deep, number // (across * deep)
    left, matrix = left.to(tl.int64) * COLUMNS, matrix.to(tl.int64) * MATRICES
    top = piece.to(tl.int64) * lines
    bottom = tl.minimum(top + lines, height)
    aligned = ((p_at | g_at | b_at) % 16 == 0) & (width % VECTOR == 0)
    whole = aligned & (left + COLUMNS <= width) & (matrix + MATRICES <= batch)
    middle = tl.where(whole, top + (bottom - top) // ROWS * ROWS, top) if WIDE else top
    stage_2_tiles(
        matrix, left, middle, bottom, batch, height, width, p_at, g_at, a_at, b_at, lr_weight_decay,
        one_over_eps1, p_new_factor, scale, stays, row, False, MATRICES,
        ROWS // 2 if VECTOR == 8 and ROWS > 1 else ROWS, COLUMNS, VECTOR,
    )
    if WIDE:
        stage_2_tiles(
            matrix, left, top, middle, batch, height, width, p_at, g_at, a_at, b_at, lr_weight_decay,
            one_over_eps1, p_new_factor, scale, stays, row, True, MATRICES, ROWS, COLUMNS, VECTOR,
        )


@triton.jit(do_not_specialize=["chunks", "known", "moving", "table", "stays", "scale"])
def stage_2(chunks, known, moving, table, stays, scale, BLOCK: tl.constexpr, VECTOR: tl.constexpr):
    """One chunk of one tensor: stage 2 stores p.

    `chunks` has pairs of a tensor and one of its chunks. A line of `known` says how a tensor lies and is
    cut, and has addresses; one of `moving` its row of `table`, and the addresses that come with each call.
    """
    chunk = chunks + 2 * tl.program_id(0).to(tl.int64)
    tensor, number = tl.load(chunk).to(tl.int64), tl.load(chunk + 1)
    known += 8 * tensor
    moving += 4 * tensor
    row = tl.load(moving)
    values = table + 11 * row
    batch, height, width = tl.load(known + 0), tl.load(known + 1), tl.load(known + 2)
    lines, tile = tl.load(known + 3), tl.load(known + 6)
    across, deep = tl.load(known + 4).to(tl.int32), tl.load(known + 5).to(tl.int32)
    p_at = tl.load(known + 7)
    g_at = tl.load(moving + 1)
    a_at = tl.load(moving + 2)
    b_at = tl.load(moving + 3)
    lr_weight_decay = tl.load(values + 3).to(tl.float32)
    one_over_eps1 = tl.load(values + 8).to(tl.float32)
    p_new_factor = tl.load(values + 10).to(tl.float32)
    if tile == 0:
        stage_2_chunk(
            number, batch, height, width, lines, across, deep, p_at, g_at, a_at, b_at, lr_weight_decay,
            one_over_eps1, p_new_factor, scale, stays, row, 1, 1, BLOCK, True, VECTOR,
        )
    elif tile == 1:
        stage_2_chunk(
            number, batch, height, width, lines, across, deep, p_at, g_at, a_at, b_at, lr_weight_decay,
            one_over_eps1, p_new_factor, scale, stays, row, 1, BLOCK // (32 * VECTOR), 32 * VECTOR, True, VECTOR,
        )
    elif tile == 2:
        stage_2_chunk(
            number, batch, height, width, lines, across, deep, p_at, g_at, a_at, b_at, lr_weight_decay,
            one_over_eps1, p_new_factor, scale, stays, row, 1, BLOCK // 8, 8, False, VECTOR,
        )
    else:
        stage_2_chunk(
            number, batch, height, width, lines, across, deep, p_at, g_at, a_at, b_at, lr_weight_decay,
            one_over_eps1, p_new_factor, scale, stays, row, BLOCK // 64, 8, 8, False, VECTOR,
        )


@triton.jit
def lowest(x, axis: tl.constexpr = None, keep_dims: tl.constexpr = False):
    """The minimum, NaN where there is one."""
    least = tl.min(tl.where(x == x, x, float("inf")), axis, keep_dims=keep_dims)
    return tl.where(tl.max((x != x).to(tl.int32), axis, keep_dims=keep_dims) != 0, float("nan"), least)


@triton.jit
def highest(x, axis: tl.constexpr = None, keep_dims: tl.constexpr = False):
    """The maximum, NaN where there is one."""
    most = tl.max(tl.where(x == x, x, -float("inf")), axis, keep_dims=keep_dims)
    return tl.where(tl.max((x != x).to(tl.int32), axis, keep_dims=keep_dims) != 0, float("nan"), most)


@triton.jit(do_not_specialize=["jobs", "slots", "results"])
def finish(jobs, slots, results, LANES: tl.constexpr):
    """Joins slots in a fixed order, round by round: to LANES results side by side, or to one.

    A line of `jobs` says what the reduction is (0 sum, 1 minimum, 2 maximum), whether to one result, where the first
    slot and the result are, how many rounds there are, how far apart these and the slots of a round are, and how many
    slots there are to one result, or results side by side.
    """
    job = jobs + 8 * tl.program_id(0).to(tl.int64)
    kind, one, at, to = tl.load(job), tl.load(job + 1), tl.load(job + 2), tl.load(job + 3)
    rounds, apart, step, limit = tl.load(job + 4), tl.load(job + 5), tl.load(job + 6), tl.load(job + 7)
    lane = tl.arange(0, LANES)
    nothing = tl.where(kind == 0, 0.0, tl.where(kind == 1, float("inf"), -float("inf"))).to(tl.float64)
    total = tl.full((LANES,), 0.0, tl.float64) + nothing
    for done in range(0, rounds):
        inside = done * one * LANES + lane < limit
        x = tl.where(inside, tl.load(slots + at + done * apart + lane * step, mask=inside), nothing)
        least = tl.minimum(total, x, propagate_nan=tl.PropagateNan.ALL)
        most = tl.maximum(total, x, propagate_nan=tl.PropagateNan.ALL)
        total = tl.where(kind == 0, total + x, tl.where(kind == 1, least, most))
    if one == 0:
        tl.store(results + to + lane, total, mask=lane < limit)
    elif kind == 0:
        tl.store(results + to, tl.sum(total))
    elif kind == 1:
        tl.store(results + to, lowest(total))
    else:
        tl.store(results + to, highest(total))


@triton.jit
def power_of_any(x, y, result):
    """x**y for any numbers, in float64, from abs(x)**y: the cases of C99's Annex F."""
    x, y = tl.broadcast(x, y)
    whole = tl.floor(y) == y
    odd = whole & (tl.floor(y * 0.5) * 2 != y)
    negative = x.to(tl.int64, bitcast=True) < 0
    result = tl.where(tl.abs(x) == 1, 1.0, result)
    result = tl.where(negative & odd, -result, result)
    result = tl.where((x < 0) & (x > float("-inf")) & (whole == 0), float("nan"), result)
    result = tl.where((x != x) | (y != y), x + y, result)
    return tl.where((x == 1) | (y == 0), 1.0, result)


@triton.jit
def exact_product(a, b):
    """(p, e) with `p` the rounded product and `p + e` the exact one: Dekker's, of factors cut in two by their bits."""
    a_high = (a.to(tl.int64, bitcast=True) & -134217728).to(tl.float64, bitcast=True)
    b_high = (b.to(tl.int64, bitcast=True) & -134217728).to(tl.float64, bitcast=True)
    a_low, b_low = a - a_high, b - b_high
    product = a * b
    return product, ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low


@triton.jit
def log_in_two(x):
    """log(x) of a positive float64 as an unevaluated sum: k*log(2) + 2*atanh(s), its first terms in two words."""
    tiny = x < 2.2250738585072014e-308
    value = tl.where(tiny, x * 18014398509481984.0, x)
    bits = value.to(tl.int64, bitcast=True)
    shift = (bits - 4604544271217802189) >> 52
    k = shift.to(tl.float64) - tl.where(tiny, 54.0, 0.0)
    m = (bits - (shift << 52)).to(tl.float64, bitcast=True)
    f = m - 1.0
    d = m + 1.0
    d_low = m - (d - 1.0)
    s = f / d
    p, e = exact_product(s, d)
    s_low = (((f - p) - e) - s * d_low) / d
    square, e = exact_product(s, s)
    square_low = e + 2.0 * s * s_low
    terms = square * (0.4 + square * (0.2857142857142857 + square * (0.2222222222222222 + square * (0.18181818181818182 + square * (0.15384615384615385 + square * (0.13333333333333333 + square * (0.11764705882352941 + square * (0.10526315789473684 + square * (0.09523809523809523 + square * (0.08695652173913043 + square * (0.08 + square * 0.07407407407407407)))))))))))
    third = terms + 0.6666666666666666
    third_low = (terms - (third - 0.6666666666666666)) + 3.700743415417188e-17
    cube, e = exact_product(square, third)
    cube_low = e + square * third_low + square_low * third
    rest, e = exact_product(s, cube)
    rest_low = e + s * cube_low + s_low * cube
    total = 2.0 * s + rest
    total_low = (rest - (total - 2.0 * s)) + (2.0 * s_low + rest_low)
    large = k * 0.6931471803691238
    near = large + total
    low = (total - (near - large)) + (k * 1.9082149292705877e-10 + total_low)
    high = near + low
    return high, low - (high - near)


@triton.jit
def power_64(x, y):
    """x**y as C99's pow, for float64."""
    size = tl.abs(x)
    ordinary = (size > 0) & (size < float("inf"))
    high, low = log_in_two(tl.where(ordinary, size, 1.0))
    high = tl.where(ordinary, high, tl.where(size == 0, float("-inf"), size))
    product, rest = exact_product(y, high)
    rest = tl.where(tl.abs(product) < 1000, rest + y * low, 0.0)
    result = tl.exp(product)
    result = tl.where(result < float("inf"), result + result * rest, result)
    return power_of_any(x, y, result)


@triton.jit(

    do_not_specialize=["counts", "groups", "hyper", "cols_at", "numel_at", "rows_at", "table", "new", "tensors", "kinds"],
)
def scalars(
    counts, groups, hyper, cols_at, numel_at, rows_at, table, new, tensors, kinds, LANES: tl.constexpr,
):
    """The row of each tensor of `table`, and the `new` values of states, a line for each: in float64.

    `tensors` is how many there are, `kinds` how many groups, each with a number in every line of `hyper`.
    """
    n = tl.program_id(0) * LANES + tl.arange(0, LANES)
    inside = n < tensors
    group = tl.load(groups + n, mask=inside, other=0)
    t = tl.load(counts + n, mask=inside, other=0).to(tl.float64) + 1
    lr = tl.load(hyper + 0 * kinds + group, mask=inside)
    beta2_decay = tl.load(hyper + 1 * kinds + group, mask=inside)
    eps1 = tl.load(hyper + 2 * kinds + group, mask=inside)
    eps2 = tl.load(hyper + 3 * kinds + group, mask=inside)
    d = tl.load(hyper + 4 * kinds + group, mask=inside)
    weight_decay = tl.load(hyper + 5 * kinds + group, mask=inside)
    cols = tl.load(cols_at + n, mask=inside)
    numel = tl.load(numel_at + n, mask=inside)
    rows_ = tl.load(rows_at + n, mask=inside)
    rho_ = power_64(t, beta2_decay)
    row = table + 11 * n
    tl.store(row + 0, cols, mask=inside)
    tl.store(row + 1, rho_, mask=inside)
    tl.store(row + 2, rows_, mask=inside)
    tl.store(row + 3, lr * weight_decay, mask=inside)
    tl.store(row + 4, numel, mask=inside)
    tl.store(row + 5, eps2, mask=inside)
    tl.store(row + 6, tl.minimum(lr, 1.0 / tl.sqrt(t), propagate_nan=tl.PropagateNan.ALL), mask=inside)
    tl.store(row + 7, eps1, mask=inside)
    tl.store(row + 8, 1.0 / eps1, mask=inside)
    tl.store(row + 9, d, mask=inside)
    tl.store(row + 10, 0.0, mask=inside)
