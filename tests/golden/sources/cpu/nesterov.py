"""Nesterov: the cpu kernel for p:bf16 g:bf16 m:bf16. Printed by rulec."""

from rulec_backends.cpu.words import (
    compiled, fetch_add, float32, inlined, load_bfloat16, lower_bfloat16, number, ordinary, store_bfloat16,
    store_two_bfloat16, upper_bfloat16, word,
)


@inlined
def update(p, g, m, momentum, lr):
    """The new values of one element."""
    m_new = momentum * m + g
    nesterov_momentum_direction = g + momentum * m_new
    p_new = p - lr * nesterov_momentum_direction
    return m_new, p_new


@compiled
def elements(pointers, tensors, tensor, row, start, stop):
    """Elements start..stop of one tensor. Its buffers do not overlap."""
    p_at = word(pointers, tensor) + 2 * start
    g_at = word(pointers, tensors + tensor) + 2 * start
    m_at = word(pointers, 2 * tensors + tensor) + 2 * start
    momentum = ordinary(float32(number(row, 0)))
    lr = ordinary(float32(number(row, 1)))
    for i in range(0, (stop - start) // 2):
        p = lower_bfloat16(p_at, i, 0)
        g = lower_bfloat16(g_at, i, 1)
        m = lower_bfloat16(m_at, i, 2)
        lower = update(p, g, m, momentum, lr)
        p = upper_bfloat16(p_at, i, 0)
        g = upper_bfloat16(g_at, i, 1)
        m = upper_bfloat16(m_at, i, 2)
        upper = update(p, g, m, momentum, lr)
        store_two_bfloat16(m_at, i, 2, lower[0], upper[0])
        store_two_bfloat16(p_at, i, 0, lower[1], upper[1])
    if (stop - start) % 2:
        i = stop - start - 1
        p = load_bfloat16(p_at, i, 0)
        g = load_bfloat16(g_at, i, 1)
        m = load_bfloat16(m_at, i, 2)
        last = update(p, g, m, momentum, lr)
        store_bfloat16(m_at, i, 2, last[0])
        store_bfloat16(p_at, i, 0, last[1])


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
            row = rows + word(row_index, tensor) * 16
            start, stop = word(chunks, 3 * chunk + 1), word(chunks, 3 * chunk + 2)
            elements(word(job, 19), tensors, tensor, row, start, stop)
    fetch_add(job + 64, -1)
