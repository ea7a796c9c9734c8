"""ScheduleFreeAdamW: the cpu kernel for p:f32 g:f32 z:f32 v:f32. Printed by rulec."""

from rulec_backends.cpu.words import (
    compiled, fetch_add, float32, load_float32, number, sqrt, store_float32, word,
)


@compiled
def elements(pointers, tensors, tensor, row, start, stop):
    """Elements start..stop of one tensor. Its buffers do not overlap."""
    p_at = word(pointers, tensor)
    g_at = word(pointers, tensors + tensor)
    z_at = word(pointers, 2 * tensors + tensor)
    v_at = word(pointers, 3 * tensors + tensor)
    beta2 = float32(number(row, 0))
    one_minus_beta2 = float32(number(row, 1))
    sqrt_one_minus_beta2_t = float32(number(row, 2))
    eps = float32(number(row, 3))
    weight_decay = float32(number(row, 4))
    gamma = float32(number(row, 5))
    one_minus_c = float32(number(row, 6))
    c = float32(number(row, 7))
    p_new_factor = float32(number(row, 8))
    for i in range(start, stop):
        p = load_float32(p_at, i, 0)
        g = load_float32(g_at, i, 1)
        z = load_float32(z_at, i, 2)
        v = load_float32(v_at, i, 3)
        v_new = beta2 * v + one_minus_beta2 * g * g
        d = g / (sqrt(v_new) / sqrt_one_minus_beta2_t + eps) + weight_decay * p
        z_new = z - gamma * d
        p_new = one_minus_c * p + c * z + p_new_factor * d
        store_float32(z_at, i, 2, z_new)
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
