"""Lion by the triton backend: p:bf16 g:bf16 m:f32. Printed by rulec.

Lion: The sign of an interpolated momentum, with decoupled weight decay.
Symbolic Discovery of Optimization Algorithms (Chen and others, 2023)
https://arxiv.org/abs/2302.06675

    c = beta1*m + (1 - beta1)*g
    direction = sign(c) + weight_decay*p
    m = beta2*m + (1 - beta2)*g
    p = p - lr*direction
"""

import triton
import triton.language as tl


@triton.jit
def to_bfloat16(x, EMULATED: tl.constexpr):
    """A float32 rounded to bfloat16, halves to even; by hand in the interpreter, whose own rounding loses carries."""
    if EMULATED:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        narrow = tl.where(x == x, rounded, (bits >> 16) | 0x40)
        return narrow.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(tl.bfloat16)


@triton.jit
def sign(x):
    """1, -1 or 0 by the sign of `x`; NaN of NaN."""
    return tl.where(x > 0, 1.0, tl.where(x < 0, -1.0, x))


@triton.jit
def stage_0_blocks(
    first, last, size, p_at, g_at, m_at, beta2, one_minus_beta2, beta1, one_minus_beta1, weight_decay,
    lr, scale, ALL: tl.constexpr, BLOCK: tl.constexpr, EMULATED: tl.constexpr,
):
    """Blocks `first` to `last` of one tensor, in float32: ALL of each, 16 bytes at a time, or those
    of its elements that are below `size`, at any address.
    """
    p_at = tl.multiple_of(p_at.to(tl.pointer_type(tl.bfloat16)), 16 if ALL else 1)
    g_at = tl.multiple_of(g_at.to(tl.pointer_type(tl.bfloat16)), 16 if ALL else 1)
    m_at = tl.multiple_of(m_at.to(tl.pointer_type(tl.float32)), 16 if ALL else 1)
    if scale is not None:
        unscale = tl.div_rn(1.0, tl.load(scale))
    i = tl.arange(0, BLOCK)
    for block in range(first, last):
        start = block * BLOCK
        inside = None if ALL else i < size - start
        p = tl.load(p_at + start + i, mask=inside).to(tl.float32)
        g = tl.load(g_at + start + i, mask=inside).to(tl.float32)
        if scale is not None:
            g = g * unscale
        m = tl.load(m_at + start + i, mask=inside)
        m_new = beta2 * m + one_minus_beta2 * g
        c = beta1 * m + one_minus_beta1 * g
        direction = sign(c) + weight_decay * p
        p_new = p - lr * direction
        tl.store(m_at + start + i, m_new, mask=inside)
        tl.store(p_at + start + i, to_bfloat16(p_new, EMULATED), mask=inside)


@triton.jit(do_not_specialize=["chunks", "known", "moving", "table", "stays", "scale"])
def stage_0(chunks, known, moving, table, stays, scale, BLOCK: tl.constexpr, EMULATED: tl.constexpr):
    """One chunk of one tensor: stage 0 stores m, p.

    `chunks` has pairs of a tensor and one of its chunks. A line of `known` says how a tensor lies and is
    cut, and has addresses; one of `moving` its row of `table`, and the addresses that come with each call.
    """
    chunk = chunks + 2 * tl.program_id(0).to(tl.int64)
    tensor, number = tl.load(chunk).to(tl.int64), tl.load(chunk + 1)
    known += 4 * tensor
    moving += 2 * tensor
    row = tl.load(moving)
    values = table + 6 * row
    size = tl.load(known + 0)
    span = tl.load(known + 1)
    p_at = tl.load(known + 2)
    m_at = tl.load(known + 3)
    g_at = tl.load(moving + 1)
    beta2 = tl.load(values + 0).to(tl.float32)
    one_minus_beta2 = tl.load(values + 1).to(tl.float32)
    beta1 = tl.load(values + 2).to(tl.float32)
    one_minus_beta1 = tl.load(values + 3).to(tl.float32)
    weight_decay = tl.load(values + 4).to(tl.float32)
    lr = tl.load(values + 5).to(tl.float32)
    first = number.to(tl.int64) * span
    last = tl.minimum(first + span, (size + BLOCK - 1) // BLOCK)
    if stays is not None:
        last = tl.where(tl.load(stays + row) == 0, last, first)
    aligned = (p_at | g_at | m_at) % 16 == 0
    whole = tl.where(aligned, tl.minimum(tl.maximum(size // BLOCK, first), last), first)
    stage_0_blocks(
        first, whole, size, p_at, g_at, m_at, beta2, one_minus_beta2, beta1, one_minus_beta1, weight_decay,
        lr, scale, True, BLOCK, EMULATED,
    )
    stage_0_blocks(
        2 * whole, 2 * last, size, p_at, g_at, m_at, beta2, one_minus_beta2, beta1, one_minus_beta1,
        weight_decay, lr, scale, False, BLOCK // 2, EMULATED,
    )


@triton.jit(do_not_specialize=["counts", "groups", "hyper", "table", "new", "tensors", "kinds"])
def scalars(counts, groups, hyper, table, new, tensors, kinds, LANES: tl.constexpr):
    """The row of each tensor of `table`, and the `new` values of states, a line for each: in float64.

    `tensors` is how many there are, `kinds` how many groups, each with a number in every line of `hyper`.
    """
    n = tl.program_id(0) * LANES + tl.arange(0, LANES)
    inside = n < tensors
    group = tl.load(groups + n, mask=inside, other=0)
    t = tl.load(counts + n, mask=inside, other=0).to(tl.float64) + 1
    lr = tl.load(hyper + 0 * kinds + group, mask=inside)
    beta1 = tl.load(hyper + 1 * kinds + group, mask=inside)
    beta2 = tl.load(hyper + 2 * kinds + group, mask=inside)
    weight_decay = tl.load(hyper + 3 * kinds + group, mask=inside)
    row = table + 6 * n
    tl.store(row + 0, beta2, mask=inside)
    tl.store(row + 1, 1.0 - beta2, mask=inside)
    tl.store(row + 2, beta1, mask=inside)
    tl.store(row + 3, 1.0 - beta1, mask=inside)
    tl.store(row + 4, weight_decay, mask=inside)
    tl.store(row + 5, lr, mask=inside)
