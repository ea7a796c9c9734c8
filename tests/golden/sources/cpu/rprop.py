"""Rprop: the cpu kernel for p:f16 g:f16 prev:f32 delta:f32. Printed by rulec."""

from rulec_backends.cpu.words import (
    compiled, fetch_add, float32, load_float16, load_float32, maximum, minimum, number, sign, store_float16,
    store_float32, where, word,
)


@compiled
def elements(pointers, tensors, tensor, row, start, stop):
    """Elements start..stop of one tensor. Its buffers do not overlap."""
    p_at = word(pointers, tensor)
    g_at = word(pointers, tensors + tensor)
    prev_at = word(pointers, 2 * tensors + tensor)
    delta_at = word(pointers, 3 * tensors + tensor)
    eta_minus = float32(number(row, 0))
    eta_plus = float32(number(row, 1))
    step_min = float32(number(row, 2))
    step_max = float32(number(row, 3))
    for i in range(start, stop):
        p = load_float16(p_at, i, 0)
        g = load_float16(g_at, i, 1)
        prev = load_float32(prev_at, i, 2)
        delta = load_float32(delta_at, i, 3)
        s = g * prev
        x1 = s < float32(0.0)
        prev_new = where(x1, float32(0.0), g)
        eta = where(s > float32(0.0), eta_plus, where(x1, eta_minus, float32(1.0)))
        delta_new = minimum(maximum(delta * eta, step_min), step_max)
        p_new = p - sign(prev_new) * delta_new
        store_float32(prev_at, i, 2, prev_new)
        store_float32(delta_at, i, 3, delta_new)
        store_float16(p_at, i, 0, p_new)


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
            row = rows + word(row_index, tensor) * 32
            start, stop = word(chunks, 3 * chunk + 1), word(chunks, 3 * chunk + 2)
            elements(word(job, 19), tensors, tensor, row, start, stop)
    fetch_add(job + 64, -1)
