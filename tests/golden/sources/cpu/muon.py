"""Muon: the cpu kernel for p:f32 g:f32 m:f32 o_part:f32, 2 stages. Printed by rulec."""

from rulec_backends.cpu.words import (
    compiled, fetch_add, float32, load_float32, number, store_float32, word,
)


@compiled
def stage_0(pointers, tensors, tensor, row, chunk, place):
    """One chunk: stores o_part, m. Buffers do not overlap."""
    start, stop = word(place, 1), word(place, 2)
    g_at = word(pointers, tensors + tensor)
    m_at = word(pointers, 2 * tensors + tensor)
    o_part_at = word(pointers, 3 * tensors + tensor)
    momentum = float32(number(row, 0))
    one_minus_momentum = float32(number(row, 1))
    for i in range(start, stop):
        g = load_float32(g_at, i, 1)
        m = load_float32(m_at, i, 2)
        x0 = one_minus_momentum * g
        m_new = momentum * m + x0
        store_float32(o_part_at, i, 3, x0 + momentum * m_new)
        store_float32(m_at, i, 2, m_new)


@compiled
def stage_1(pointers, tensors, tensor, row, chunk, place):
    """One chunk: stores p. Buffers do not overlap."""
    start, stop = word(place, 1), word(place, 2)
    p_at = word(pointers, tensor)
    o_at = word(pointers, 4 * tensors + tensor)
    sqrt_max_one_rows_over_cols = float32(number(row, 3))
    weight_decay = float32(number(row, 4))
    lr = float32(number(row, 5))
    for i in range(start, stop):
        p = load_float32(p_at, i, 0)
        o = load_float32(o_at, i, 4)
        direction = sqrt_max_one_rows_over_cols * o + weight_decay * p
        p_new = p - lr * direction
        store_float32(p_at, i, 0, p_new)


@compiled
def kernel(job):
    """Takes spans of chunks from the job until none is left; any number of threads may run it on one job."""
    fetch_add(job + 64, 1)
    spans, chunks = word(job, 17), word(job, 18)
    tensors, row_index, rows = word(job, 20), word(job, 21), word(job, 22)
    stage, pointers = word(job, 23), word(job, 19)
    while True:
        span = fetch_add(job + 0, 1)
        if span >= word(job, 16):
            break
        for chunk in range(word(spans, 2 * span), word(spans, 2 * span + 1)):
            place = chunks + chunk * 24
            tensor = word(place, 0)
            row = rows + word(row_index, tensor) * 48
            if stage == 0:
                stage_0(pointers, tensors, tensor, row, chunk, place)
            if stage == 1:
                stage_1(pointers, tensors, tensor, row, chunk, place)
    fetch_add(job + 64, -1)
