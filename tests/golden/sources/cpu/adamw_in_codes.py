"""AdamW: the cpu kernel for p:f32 g:f32 m:dynamic8/256-signed v:dynamic4/128-unsigned-floor. Printed by rulec."""

from rulec_backends.cpu.format_words import (
    above, below, clear, decode_dynamic4_unsigned_floor, decode_dynamic8_signed,
    decode_last_dynamic4_unsigned_floor, encode_dynamic4_unsigned_floor, encode_dynamic8_signed,
    encode_last_dynamic4_unsigned_floor, factor_dynamic4_unsigned_floor, factor_dynamic8_signed, floats, int32,
    prefetch, scale_dynamic4_unsigned_floor, scale_dynamic8_signed, unit_dynamic4_unsigned_floor,
    unit_dynamic8_signed,
)
from rulec_backends.cpu.words import (
    compiled, fetch_add, float32, inlined, load_float32, number, sqrt, store_float32, word,
)


@inlined
def decode_dynamic8_256_signed(codes, scales, count, values):
    """The values of count elements: of some of a block, or of whole blocks and perhaps a short last one."""
    for block in range((count + 255) // 256):
        unit = unit_dynamic8_signed(scales, block)
        first, last = block * 256, min((block + 1) * 256, count)
        for i in range(first, last):
            decode_dynamic8_signed(values, i, codes, unit)


@inlined
def encode_dynamic8_256_signed(codes, scales, count, values):
    """The codes and scales of count elements, of whole blocks and perhaps a short last one; scales come first."""
    for block in range((count + 255) // 256):
        first, last = block * 256, min((block + 1) * 256, count)
        positive = negative = int32(0)
        for i in range(first, last):
            positive, negative = above(positive, values, i), below(negative, values, i)
        scale_dynamic8_signed(scales, block, positive, negative)
    for block in range((count + 255) // 256):
        first, last = block * 256, min((block + 1) * 256, count)
        factor = factor_dynamic8_signed(scales, block)
        if factor != factor:
            for i in range(first, last):
                clear(codes, i)
            continue
        for i in range(first, last):
            encode_dynamic8_signed(codes, i, values, factor)


@inlined
def decode_dynamic4_128_unsigned_floor(codes, scales, count, values):
    """The values of count elements: of some of a block, or of whole blocks and perhaps a short last one."""
    for block in range((count + 127) // 128):
        unit = unit_dynamic4_unsigned_floor(scales, block)
        first, last = block * 128, min((block + 1) * 128, count)
        for i in range(first // 2, last // 2):
            decode_dynamic4_unsigned_floor(values, i, codes, unit)
        if last % 2:
            decode_last_dynamic4_unsigned_floor(values, last // 2, codes, unit)


@inlined
def encode_dynamic4_128_unsigned_floor(codes, scales, count, values):
    """The codes and scales of count elements, of whole blocks and perhaps a short last one; scales come first."""
    for block in range((count + 127) // 128):
        first, last = block * 128, min((block + 1) * 128, count)
        positive = negative = int32(0)
        for i in range(first, last):
            positive, negative = above(positive, values, i), below(negative, values, i)
        scale_dynamic4_unsigned_floor(scales, block, positive, negative)
    for block in range((count + 127) // 128):
        first, last = block * 128, min((block + 1) * 128, count)
        factor = factor_dynamic4_unsigned_floor(scales, block)
        if factor != factor:
            for i in range(first // 2, (last + 1) // 2):
                clear(codes, i)
            continue
        for i in range(first // 2, last // 2):
            encode_dynamic4_unsigned_floor(codes, i, values, factor)
        if last % 2:
            encode_last_dynamic4_unsigned_floor(codes, last // 2, values, factor)


@compiled
def elements(pointers, tensors, tensor, row, start, stop):
    """Elements start..stop of one tensor. Its buffers do not overlap."""
    m_codes = word(pointers, 2 * tensors + tensor)
    m_scales = word(pointers, 4 * tensors + tensor)
    v_codes = word(pointers, 3 * tensors + tensor)
    v_scales = word(pointers, 5 * tensors + tensor)
    m_at = floats(1024)
    v_at = floats(1024)
    beta1 = float32(number(row, 0))
    one_minus_beta1 = float32(number(row, 1))
    beta2 = float32(number(row, 2))
    one_minus_beta2 = float32(number(row, 3))
    one_minus_beta1_t = float32(number(row, 4))
    sqrt_one_minus_beta2_t = float32(number(row, 5))
    eps = float32(number(row, 6))
    weight_decay = float32(number(row, 7))
    lr = float32(number(row, 8))
    for part in range(start, stop, 1024):
        count = min(stop - part, 1024)
        p_at = word(pointers, tensor) + 4 * part
        g_at = word(pointers, tensors + tensor) + 4 * part
        for first in range(0, count, 128):
            last, place = min(first + 128, count), part + first
            decode_dynamic8_256_signed(m_codes + place, m_scales + place // 256 * 4, last - first, m_at + 4 * first)
            decode_dynamic4_128_unsigned_floor(v_codes + place // 2, v_scales + place // 128 * 4, last - first, v_at + 4 * first)
            for i in range(4 * first, 4 * last, 64):
                prefetch(p_at, i)
            for i in range(4 * first, 4 * last, 64):
                prefetch(g_at, i)
            for i in range(first, last):
                p = load_float32(p_at, i, 0)
                g = load_float32(g_at, i, 1)
                m = load_float32(m_at, i, 2)
                v = load_float32(v_at, i, 3)
                m_new = beta1 * m + one_minus_beta1 * g
                v_new = beta2 * v + one_minus_beta2 * g * g
                m_hat = m_new / one_minus_beta1_t
                sigma = sqrt(v_new) / sqrt_one_minus_beta2_t
                adam_direction = m_hat / (sigma + eps)
                decay_direction = weight_decay * p
                direction = adam_direction + decay_direction
                p_new = p - lr * direction
                store_float32(m_at, i, 2, m_new)
                store_float32(v_at, i, 3, v_new)
                store_float32(p_at, i, 0, p_new)
            encode_dynamic4_128_unsigned_floor(v_codes + place // 2, v_scales + place // 128 * 4, last - first, v_at + 4 * first)
        encode_dynamic8_256_signed(m_codes + part, m_scales + part // 256 * 4, count, m_at)


@compiled
def kernel(job):
    """Takes spans of chunks from the job until none is left; any number of threads may run it on one job."""
    fetch_add(job + 64, 1)
    spans, chunks = word(job, 17), word(job, 18)
    tensors, row_index, rows = word(job, 20), word(job, 21), word(job, 22)
    while True:
        span = fetch_add(job + 0, 1)
        if span >= word(job, 16):
            break
        for chunk in range(word(spans, 2 * span), word(spans, 2 * span + 1)):
            tensor = word(chunks, 3 * chunk)
            row = rows + word(row_index, tensor) * 72
            start, stop = word(chunks, 3 * chunk + 1), word(chunks, 3 * chunk + 2)
            elements(word(job, 19), tensors, tensor, row, start, stop)
    fetch_add(job + 64, -1)
