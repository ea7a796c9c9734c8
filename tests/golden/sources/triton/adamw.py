"""AdamW by the triton backend: p:f32 g:f32 m:f32 v:f32. Printed by rulec.

AdamW: Adam with decoupled weight decay.
Decoupled Weight Decay Regularization (Loshchilov, Hutter, 2019)
https://arxiv.org/abs/1711.05101

    m = beta1*m + (1 - beta1)*g
    v = beta2*v + (1 - beta2)*g*g
    m_hat = m/(1 - beta1**t)
    sigma = sqrt(v)/sqrt(1 - beta2**t)
    adam.direction = m_hat/(sigma + eps)
    decay.direction = weight_decay*p
    direction = adam.direction + decay.direction
    p = p - lr*direction
"""

import triton
import triton.language as tl


@triton.jit
def reciprocal(divisor):
    """1/divisor where quotients by it are products; else NaN, and they are divisions."""
    is_safe = (divisor >= 2.384185791015625e-07) & (divisor <= 4.253529586511731e+37)
    return tl.where(is_safe, tl.div_rn(1.0, divisor), float("nan"))


def is_nvidia(_semantic=None, _builder=None):
    """Whether the kernel is compiled for a GPU of NVIDIA. The compiler gives one of the arguments."""
    builder = _builder if _semantic is None else _semantic.builder
    return tl.constexpr(builder is not None and builder.options.backend_name == "cuda")


is_nvidia.__triton_builtin__ = True


@triton.jit
def quotient(x, divisor, inverse):
    """x/divisor as IEEE rounds it, with the inverse of the divisor from `reciprocal`."""
    if is_nvidia():
        return tl.inline_asm_elementwise(
            """{
                .reg .pred is_inside, is_unsafe, divides;
                .reg .b32 bits_0, bits_1;
                .reg .f32 near_0, near_1, rest_0, rest_1;
                mul.rn.f32 near_0, $2, $6;
                mul.rn.f32 near_1, $3, $7;
                neg.f32 rest_0, $2;
                neg.f32 rest_1, $3;
                fma.rn.f32 rest_0, near_0, $4, rest_0;
                fma.rn.f32 rest_1, near_1, $5, rest_1;
                neg.f32 rest_0, rest_0;
                neg.f32 rest_1, rest_1;
                fma.rn.f32 $0, rest_0, $6, near_0;
                fma.rn.f32 $1, rest_1, $7, near_1;
                mov.b32 bits_0, near_0;
                mov.b32 bits_1, near_1;
                add.u32 bits_0, bits_0, 679477248;
                add.u32 bits_1, bits_1, 679477248;
                and.b32 bits_0, bits_0, bits_1;
                and.b32 bits_0, bits_0, 1073741824;
                setp.ne.b32 is_inside, bits_0, 0;
                @is_inside bra DONE;
                setp.nan.f32 is_unsafe, $6, $7;
                setp.neu.or.f32 divides, $2, 0f00000000, is_unsafe;
                @divides div.rn.f32 $0, $2, $4;
                setp.neu.or.f32 divides, $3, 0f00000000, is_unsafe;
                @divides div.rn.f32 $1, $3, $5;
                DONE:
            }""",
            "=&f,=&f,f,f,f,f,f,f", [x, divisor, inverse], dtype=tl.float32, is_pure=True, pack=2,
        )
    else:
        return tl.div_rn(x, divisor)


@triton.jit
def stage_0_blocks(
    first, last, size, p_at, g_at, m_at, v_at, beta1, one_minus_beta1, beta2, one_minus_beta2,
    one_minus_beta1_t, sqrt_one_minus_beta2_t, eps, weight_decay, lr, scale, ALL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Blocks `first` to `last` of one tensor, in float32: ALL of each, 16 bytes at a time, or those
    of its elements that are below `size`, at any address.
    """
    p_at = tl.multiple_of(p_at.to(tl.pointer_type(tl.float32)), 16 if ALL else 1)
    g_at = tl.multiple_of(g_at.to(tl.pointer_type(tl.float32)), 16 if ALL else 1)
    m_at = tl.multiple_of(m_at.to(tl.pointer_type(tl.float32)), 16 if ALL else 1)
    v_at = tl.multiple_of(v_at.to(tl.pointer_type(tl.float32)), 16 if ALL else 1)
    one_minus_beta1_t_inverse = reciprocal(one_minus_beta1_t)
    sqrt_one_minus_beta2_t_inverse = reciprocal(sqrt_one_minus_beta2_t)
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
        m = tl.load(m_at + start + i, mask=inside)
        v = tl.load(v_at + start + i, mask=inside)
        m_new = beta1 * m + one_minus_beta1 * g
        v_new = beta2 * v + one_minus_beta2 * g * g
        m_hat = quotient(m_new, one_minus_beta1_t, one_minus_beta1_t_inverse)
        sigma = quotient(tl.sqrt_rn(v_new), sqrt_one_minus_beta2_t, sqrt_one_minus_beta2_t_inverse)
        adam_direction = tl.div_rn(m_hat, sigma + eps)
        decay_direction = weight_decay * p
        direction = adam_direction + decay_direction
        p_new = p - lr * direction
        tl.store(m_at + start + i, m_new, mask=inside)
        tl.store(v_at + start + i, v_new, mask=inside)
        tl.store(p_at + start + i, p_new, mask=inside)


@triton.jit(do_not_specialize=["chunks", "known", "moving", "table", "stays", "scale"])
def stage_0(chunks, known, moving, table, stays, scale, BLOCK: tl.constexpr):
    """One chunk of one tensor: stage 0 stores m, v, p.

    `chunks` has pairs of a tensor and one of its chunks. A line of `known` says how a tensor lies and is
    cut, and has addresses; one of `moving` its row of `table`, and the addresses that come with each call.
    """
    chunk = chunks + 2 * tl.program_id(0).to(tl.int64)
    tensor, number = tl.load(chunk).to(tl.int64), tl.load(chunk + 1)
    known += 5 * tensor
    moving += 2 * tensor
    row = tl.load(moving)
    values = table + 9 * row
    size = tl.load(known + 0)
    span = tl.load(known + 1)
    p_at = tl.load(known + 2)
    m_at = tl.load(known + 3)
    v_at = tl.load(known + 4)
    g_at = tl.load(moving + 1)
    beta1 = tl.load(values + 0).to(tl.float32)
    one_minus_beta1 = tl.load(values + 1).to(tl.float32)
    beta2 = tl.load(values + 2).to(tl.float32)
    one_minus_beta2 = tl.load(values + 3).to(tl.float32)
    one_minus_beta1_t = tl.load(values + 4).to(tl.float32)
    sqrt_one_minus_beta2_t = tl.load(values + 5).to(tl.float32)
    eps = tl.load(values + 6).to(tl.float32)
    weight_decay = tl.load(values + 7).to(tl.float32)
    lr = tl.load(values + 8).to(tl.float32)
    first = number.to(tl.int64) * span
    last = tl.minimum(first + span, (size + BLOCK - 1) // BLOCK)
    if stays is not None:
        last = tl.where(tl.load(stays + row) == 0, last, first)
    aligned = (p_at | g_at | m_at | v_at) % 16 == 0
    whole = tl.where(aligned, tl.minimum(tl.maximum(size // BLOCK, first), last), first)
    stage_0_blocks(
        first, whole, size, p_at, g_at, m_at, v_at, beta1, one_minus_beta1, beta2, one_minus_beta2,
        one_minus_beta1_t, sqrt_one_minus_beta2_t, eps, weight_decay, lr, scale, True, BLOCK,
    )
    stage_0_blocks(
        2 * whole, 2 * last, size, p_at, g_at, m_at, v_at, beta1, one_minus_beta1, beta2, one_minus_beta2,
        one_minus_beta1_t, sqrt_one_minus_beta2_t, eps, weight_decay, lr, scale, False, BLOCK // 2,
    )


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
    eps = tl.load(hyper + 3 * kinds + group, mask=inside)
    weight_decay = tl.load(hyper + 4 * kinds + group, mask=inside)
    row = table + 9 * n
    tl.store(row + 0, beta1, mask=inside)
    tl.store(row + 1, 1.0 - beta1, mask=inside)
    tl.store(row + 2, beta2, mask=inside)
    tl.store(row + 3, 1.0 - beta2, mask=inside)
    tl.store(row + 4, 1.0 - power_64(beta1, t), mask=inside)
    tl.store(row + 5, tl.sqrt(1.0 - power_64(beta2, t)), mask=inside)
    tl.store(row + 6, eps, mask=inside)
    tl.store(row + 7, weight_decay, mask=inside)
    tl.store(row + 8, lr, mask=inside)
