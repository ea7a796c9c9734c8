"""SGD by the triton backend: p:f32 g:f32. Printed by rulec.

SGD: Stochastic gradient descent, one step down the gradient.
A Stochastic Approximation Method (Robbins, Monro, 1951)
https://doi.org/10.1214/aoms/1177729586

    direction = g
    p = p - lr*direction
"""

import triton
import triton.language as tl


@triton.jit
def stage_0_blocks(first, last, size, p_at, g_at, lr, scale, ALL: tl.constexpr, BLOCK: tl.constexpr):
    """Blocks `first` to `last` of one tensor, in float32: ALL of each, 16 bytes at a time, or those
    of its elements that are below `size`, at any address.
    """
    p_at = tl.multiple_of(p_at.to(tl.pointer_type(tl.float32)), 16 if ALL else 1)
    g_at = tl.multiple_of(g_at.to(tl.pointer_type(tl.float32)), 16 if ALL else 1)
    if scale is not None:
        unscale = tl.div_rn(1.0, tl.load(scale))
    i = tl.arange(0, BLOCK)
    for block in range(first, last):
        start = block * BLOCK
        inside = None if ALL else i < size - start
        p = tl.load(p_at + start + i, mask=inside)
        g = tl.load(g_at + start + i, mask=inside)
        if scale is not None:
            g = g * unscale
        p_new = p - lr * g
        tl.store(p_at + start + i, p_new, mask=inside)


@triton.jit(do_not_specialize=["chunks", "known", "moving", "table", "stays", "scale"])
def stage_0(chunks, known, moving, table, stays, scale, BLOCK: tl.constexpr):
    """One chunk of one tensor: stage 0 stores p.

    `chunks` has pairs of a tensor and one of its chunks. A line of `known` says how a tensor lies and is
    cut, and has addresses; one of `moving` its row of `table`, and the addresses that come with each call.
    """
    chunk = chunks + 2 * tl.program_id(0).to(tl.int64)
    tensor, number = tl.load(chunk).to(tl.int64), tl.load(chunk + 1)
    known += 3 * tensor
    moving += 2 * tensor
    row = tl.load(moving)
    values = table + 1 * row
    size = tl.load(known + 0)
    span = tl.load(known + 1)
    p_at = tl.load(known + 2)
    g_at = tl.load(moving + 1)
    lr = tl.load(values + 0).to(tl.float32)
    first = number.to(tl.int64) * span
    last = tl.minimum(first + span, (size + BLOCK - 1) // BLOCK)
    if stays is not None:
        last = tl.where(tl.load(stays + row) == 0, last, first)
    aligned = (p_at | g_at) % 16 == 0
    whole = tl.where(aligned, tl.minimum(tl.maximum(size // BLOCK, first), last), first)
    stage_0_blocks(first, whole, size, p_at, g_at, lr, scale, True, BLOCK)
    stage_0_blocks(2 * whole, 2 * last, size, p_at, g_at, lr, scale, False, BLOCK // 2)


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
    row = table + 1 * n
    tl.store(row + 0, lr, mask=inside)
