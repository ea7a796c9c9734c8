"""Muon by the triton backend: p:f32 g:f32 m:f32 o_part:f32. Printed by rulec.

Muon: Orthogonalized Nesterov momentum for matrices, and AdamW for all else.
Muon: An optimizer for hidden layers in neural networks (Jordan and others, 2024)
https://kellerjordan.github.io/posts/muon/

    m = momentum*m + (1 - momentum)*g
    o = newton_schulz((1 - momentum)*g + momentum*m, steps=ns_steps, dtype="bfloat16")
    direction = sqrt(maximum(1, rows/cols))*o + weight_decay*p
    p = p - lr*direction
"""

import triton
import triton.language as tl


@triton.jit
def stage_0_blocks(
    first, last, size, g_at, m_at, o_part_at, momentum, one_minus_momentum, scale, stays, row,
    ALL: tl.constexpr, BLOCK: tl.constexpr,
):
    """Blocks `first` to `last` of one tensor, in float32: ALL of each, 16 bytes at a time, or those
    of its elements that are below `size`, at any address.
    """
    g_at = tl.multiple_of(g_at.to(tl.pointer_type(tl.float32)), 16 if ALL else 1)
    m_at = tl.multiple_of(m_at.to(tl.pointer_type(tl.float32)), 16 if ALL else 1)
    o_part_at = tl.multiple_of(o_part_at.to(tl.pointer_type(tl.float32)), 16 if ALL else 1)
    if scale is not None:
        unscale = tl.div_rn(1.0, tl.load(scale))
    if stays is not None:
        write = tl.load(stays + row) == 0
    i = tl.arange(0, BLOCK)
    for block in range(first, last):
        start = block * BLOCK
        inside = None if ALL else i < size - start
        g = tl.load(g_at + start + i, mask=inside)
        if scale is not None:
            g = g * unscale
        m = tl.load(m_at + start + i, mask=inside)
        x0 = one_minus_momentum * g
        m_new = momentum * m + x0
        writable = inside if stays is None else (write if ALL else inside & write)
        tl.store(o_part_at + start + i, x0 + momentum * m_new, mask=inside)
        tl.store(m_at + start + i, m_new, mask=writable)


@triton.jit(do_not_specialize=["chunks", "known", "moving", "table", "stays", "scale"])
def stage_0(chunks, known, moving, table, stays, scale, BLOCK: tl.constexpr):
    """One chunk of one tensor: stage 0 stores o_part, m.

    `chunks` has pairs of a tensor and one of its chunks. A line of `known` says how a tensor lies and is
    cut, and has addresses; one of `moving` its row of `table`, and the addresses that come with each call.
    """
    chunk = chunks + 2 * tl.program_id(0).to(tl.int64)
    tensor, number = tl.load(chunk).to(tl.int64), tl.load(chunk + 1)
    known += 3 * tensor
    moving += 3 * tensor
    row = tl.load(moving)
    values = table + 6 * row
    size = tl.load(known + 0)
    span = tl.load(known + 1)
    m_at = tl.load(known + 2)
    g_at = tl.load(moving + 1)
    o_part_at = tl.load(moving + 2)
    momentum = tl.load(values + 0).to(tl.float32)
    one_minus_momentum = tl.load(values + 1).to(tl.float32)
    first = number.to(tl.int64) * span
    last = tl.minimum(first + span, (size + BLOCK - 1) // BLOCK)
    aligned = (g_at | m_at | o_part_at) % 16 == 0
    whole = tl.where(aligned, tl.minimum(tl.maximum(size // BLOCK, first), last), first)
    stage_0_blocks(
        first, whole, size, g_at, m_at, o_part_at, momentum, one_minus_momentum, scale, stays, row, True,
        BLOCK,
    )
    stage_0_blocks(
        2 * whole, 2 * last, size, g_at, m_at, o_part_at, momentum, one_minus_momentum, scale, stays, row,
        False, BLOCK // 2,
    )


@triton.jit
def stage_1_blocks(
    first, last, size, p_at, o_at, sqrt_max_one_rows_over_cols, weight_decay, lr, ALL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Blocks `first` to `last` of one tensor, in float32: ALL of each, 16 bytes at a time, or those
    of its elements that are below `size`, at any address.
    """
    p_at = tl.multiple_of(p_at.to(tl.pointer_type(tl.float32)), 16 if ALL else 1)
    o_at = tl.multiple_of(o_at.to(tl.pointer_type(tl.float32)), 16 if ALL else 1)
    i = tl.arange(0, BLOCK)
    for block in range(first, last):
        start = block * BLOCK
        inside = None if ALL else i < size - start
        p = tl.load(p_at + start + i, mask=inside)
        o = tl.load(o_at + start + i, mask=inside)
        direction = sqrt_max_one_rows_over_cols * o + weight_decay * p
        p_new = p - lr * direction
        tl.store(p_at + start + i, p_new, mask=inside)


@triton.jit(do_not_specialize=["chunks", "known", "moving", "table", "stays", "scale"])
def stage_1(chunks, known, moving, table, stays, scale, BLOCK: tl.constexpr):
    """One chunk of one tensor: stage 1 stores p.

    `chunks` has pairs of a tensor and one of its chunks. A line of `known` says how a tensor lies and is
    cut, and has addresses; one of `moving` its row of `table`, and the addresses that come with each call.
    """
    chunk = chunks + 2 * tl.program_id(0).to(tl.int64)
    tensor, number = tl.load(chunk).to(tl.int64), tl.load(chunk + 1)
    known += 3 * tensor
    moving += 2 * tensor
    row = tl.load(moving)
    values = table + 6 * row
    size = tl.load(known + 0)
    span = tl.load(known + 1)
    p_at = tl.load(known + 2)
    o_at = tl.load(moving + 1)
    sqrt_max_one_rows_over_cols = tl.load(values + 3).to(tl.float32)
    weight_decay = tl.load(values + 4).to(tl.float32)
    lr = tl.load(values + 5).to(tl.float32)
    first = number.to(tl.int64) * span
    last = tl.minimum(first + span, (size + BLOCK - 1) // BLOCK)
    if stays is not None:
        last = tl.where(tl.load(stays + row) == 0, last, first)
    aligned = (p_at | o_at) % 16 == 0
    whole = tl.where(aligned, tl.minimum(tl.maximum(size // BLOCK, first), last), first)
    stage_1_blocks(first, whole, size, p_at, o_at, sqrt_max_one_rows_over_cols, weight_decay, lr, True, BLOCK)
    stage_1_blocks(
        2 * whole, 2 * last, size, p_at, o_at, sqrt_max_one_rows_over_cols, weight_decay, lr, False,
        BLOCK // 2,
    )


@triton.jit(

    do_not_specialize=["counts", "groups", "hyper", "cols_at", "rows_at", "table", "new", "tensors", "kinds"],
)
def scalars(counts, groups, hyper, cols_at, rows_at, table, new, tensors, kinds, LANES: tl.constexpr):
    """The row of each tensor of `table`, and the `new` values of states, a line for each: in float64.

    `tensors` is how many there are, `kinds` how many groups, each with a number in every line of `hyper`.
    """
    n = tl.program_id(0) * LANES + tl.arange(0, LANES)
    inside = n < tensors
    group = tl.load(groups + n, mask=inside, other=0)
    t = tl.load(counts + n, mask=inside, other=0).to(tl.float64) + 1
    lr = tl.load(hyper + 0 * kinds + group, mask=inside)
    momentum = tl.load(hyper + 1 * kinds + group, mask=inside)
    weight_decay = tl.load(hyper + 2 * kinds + group, mask=inside)
    ns_steps = tl.load(hyper + 3 * kinds + group, mask=inside)
    cols = tl.load(cols_at + n, mask=inside)
    rows_ = tl.load(rows_at + n, mask=inside)
    row = table + 6 * n
    tl.store(row + 0, momentum, mask=inside)
    tl.store(row + 1, 1.0 - momentum, mask=inside)
    tl.store(row + 2, ns_steps, mask=inside)
    tl.store(row + 3, tl.sqrt(tl.maximum(tl.full((), 1.0, tl.float64), rows_ / cols, propagate_nan=tl.PropagateNan.ALL)), mask=inside)
    tl.store(row + 4, weight_decay, mask=inside)
    tl.store(row + 5, lr, mask=inside)
