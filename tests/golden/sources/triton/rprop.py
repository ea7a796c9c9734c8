"""Rprop by the triton backend: p:f16 g:f16 prev:f32 delta:f32. Printed by rulec.

Rprop: Steps of a size of their own for every element, grown while its gradient keeps its sign.
A direct adaptive method for faster backpropagation learning: the RPROP algorithm (Riedmiller, Braun, 1993)
https://doi.org/10.1109/ICNN.1993.298623

    s = g*prev
    eta = where(s > 0, eta_plus, where(s < 0, eta_minus, 1))
    delta = minimum(maximum(delta*eta, step_min), step_max)
    prev = where(s < 0, 0, g)
    p = p - sign(prev)*delta
"""

import triton
import triton.language as tl


@triton.jit
def sign(x):
    """1, -1 or 0 by the sign of `x`; NaN of NaN."""
    return tl.where(x > 0, 1.0, tl.where(x < 0, -1.0, x))


@triton.jit
def stage_0_blocks(
    first, last, size, p_at, g_at, prev_at, delta_at, eta_minus, eta_plus, step_min, step_max, scale,
    ALL: tl.constexpr, BLOCK: tl.constexpr,
):
    """Blocks `first` to `last` of one tensor, in float32: ALL of each, 16 bytes at a time, or those
    of its elements that are below `size`, at any address.
    """
    p_at = tl.multiple_of(p_at.to(tl.pointer_type(tl.float16)), 16 if ALL else 1)
    g_at = tl.multiple_of(g_at.to(tl.pointer_type(tl.float16)), 16 if ALL else 1)
    prev_at = tl.multiple_of(prev_at.to(tl.pointer_type(tl.float32)), 16 if ALL else 1)
    delta_at = tl.multiple_of(delta_at.to(tl.pointer_type(tl.float32)), 16 if ALL else 1)
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
        prev = tl.load(prev_at + start + i, mask=inside)
        delta = tl.load(delta_at + start + i, mask=inside)
        s = g * prev
        x1 = s < 0.0
        prev_new = tl.where(x1, tl.full((), 0.0, tl.float32), g)
        eta = tl.where(s > 0.0, eta_plus, tl.where(x1, eta_minus, tl.full((), 1.0, tl.float32)))
        delta_new = tl.minimum(tl.maximum(delta * eta, step_min, propagate_nan=tl.PropagateNan.ALL), step_max, propagate_nan=tl.PropagateNan.ALL)
        p_new = p - sign(prev_new) * delta_new
        tl.store(prev_at + start + i, prev_new, mask=inside)
        tl.store(delta_at + start + i, delta_new, mask=inside)
        tl.store(p_at + start + i, p_new, mask=inside)


@triton.jit(do_not_specialize=["chunks", "known", "moving", "table", "stays", "scale"])
def stage_0(chunks, known, moving, table, stays, scale, BLOCK: tl.constexpr):
    """One chunk of one tensor: stage 0 stores prev, delta, p.

    `chunks` has pairs of a tensor and one of its chunks. A line of `known` says how a tensor lies and is
    cut, and has addresses; one of `moving` its row of `table`, and the addresses that come with each call.
    """
    chunk = chunks + 2 * tl.program_id(0).to(tl.int64)
    tensor, number = tl.load(chunk).to(tl.int64), tl.load(chunk + 1)
    known += 5 * tensor
    moving += 2 * tensor
    row = tl.load(moving)
    values = table + 4 * row
    size = tl.load(known + 0)
    span = tl.load(known + 1)
    p_at = tl.load(known + 2)
    prev_at = tl.load(known + 3)
    delta_at = tl.load(known + 4)
    g_at = tl.load(moving + 1)
    eta_minus = tl.load(values + 0).to(tl.float32)
    eta_plus = tl.load(values + 1).to(tl.float32)
    step_min = tl.load(values + 2).to(tl.float32)
    step_max = tl.load(values + 3).to(tl.float32)
    first = number.to(tl.int64) * span
    last = tl.minimum(first + span, (size + BLOCK - 1) // BLOCK)
    if stays is not None:
        last = tl.where(tl.load(stays + row) == 0, last, first)
    aligned = (p_at | g_at | prev_at | delta_at) % 16 == 0
    whole = tl.where(aligned, tl.minimum(tl.maximum(size // BLOCK, first), last), first)
    stage_0_blocks(
        first, whole, size, p_at, g_at, prev_at, delta_at, eta_minus, eta_plus, step_min, step_max, scale,
        True, BLOCK,
    )
    stage_0_blocks(
        2 * whole, 2 * last, size, p_at, g_at, prev_at, delta_at, eta_minus, eta_plus, step_min, step_max,
        scale, False, BLOCK // 2,
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
    eta_minus = tl.load(hyper + 1 * kinds + group, mask=inside)
    eta_plus = tl.load(hyper + 2 * kinds + group, mask=inside)
    step_min = tl.load(hyper + 3 * kinds + group, mask=inside)
    step_max = tl.load(hyper + 4 * kinds + group, mask=inside)
    row = table + 4 * n
    tl.store(row + 0, eta_minus, mask=inside)
    tl.store(row + 1, eta_plus, mask=inside)
    tl.store(row + 2, step_min, mask=inside)
    tl.store(row + 3, step_max, mask=inside)
