"""AdamW: the cpu kernel for p:f32 g:f32 m:f32 v:f32, with a gradient of popcount noise. Printed by rulec."""

from rulec_backends.cpu.noise_words import (
    add_popcount, make_words, room,
)
from rulec_backends.cpu.words import (
    compiled, fetch_add, float32, load_float32, number, sqrt, store_float32, word,
)


@compiled
def gradient(noise, first, count, gradient_at):
    """Elements first..first+count of the gradient: the noise of directions times their weights, in order."""
    words_at = room(2048)
    batches, groups = (count + 127) // 128, (count + 31) // 32
    for i in range(128 * batches):
        store_float32(gradient_at, i, 1, float32(0.0))
    directions = noise + word(noise, 0)
    for direction in range(word(noise, 1)):
        pair = word(directions, 2 * direction)
        weight = float32(number(directions, 2 * direction + 1))
        for batch in range(batches):
            block = first // 16 + 8 * batch
            make_words(words_at + 128 * batch, noise, pair, block)
        for i in range(groups):
            add_popcount(gradient_at, i, words_at, weight)


@compiled
def elements(pointers, tensors, tensor, row, start, stop):
    """Elements start..stop of one tensor. Its buffers do not overlap."""
    p_at = word(pointers, tensor)
    g_at = room(8192)
    m_at = word(pointers, 2 * tensors + tensor)
    v_at = word(pointers, 3 * tensors + tensor)
    beta1 = float32(number(row, 0))
    one_minus_beta1 = float32(number(row, 1))
    beta2 = float32(number(row, 2))
    one_minus_beta2 = float32(number(row, 3))
    one_minus_beta1_t = float32(number(row, 4))
    sqrt_one_minus_beta2_t = float32(number(row, 5))
    eps = float32(number(row, 6))
    weight_decay = float32(number(row, 7))
    lr = float32(number(row, 8))
    noise = word(pointers, tensors + tensor)
    offset = word(noise, 6)
    for first in range((offset + start) // 128 * 128, offset + stop, 2048):
        last = min(first + 2048, offset + stop)
        gradient(noise, first, last - first, g_at)
        for i in range(max(first - offset, start), last - offset):
            p = load_float32(p_at, i, 0)
            g = load_float32(g_at, i + offset - first, 1)
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
