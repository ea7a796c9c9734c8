"""Lion: the cpu kernel for p:bf16 g:bf16 m:f32. Printed by rulec."""

from rulec_backends.cpu.words import (
    compiled, fetch_add, float32, load_bfloat16, load_float32, number, ordinary, sign, store_bfloat16,
    store_float32, word,
)


@compiled
def elements(pointers, tensors, tensor, row, start, stop):
    """Elements start..stop of one tensor. Its buffers do not overlap."""
    p_at = word(pointers, tensor)
    g_at = word(pointers, tensors + tensor)
    m_at = word(pointers, 2 * tensors + tensor)
    beta2 = ordinary(float32(number(row, 0)))
    one_minus_beta2 = ordinary(float32(number(row, 1)))
    beta1 = ordinary(float32(number(row, 2)))
    one_minus_beta1 = ordinary(float32(number(row, 3)))
    weight_decay = ordinary(float32(number(row, 4)))
    lr = ordinary(float32(number(row, 5)))
    for i in range(start, stop):
        p = load_bfloat16(p_at, i, 0)
        g = load_bfloat16(g_at, i, 1)
        m = ordinary(load_float32(m_at, i, 2))
        m_new = beta2 * m + one_minus_beta2 * g
        c = beta1 * m + one_minus_beta1 * g
        direction = sign(c) + weight_decay * p
        p_new = p - lr * direction
        store_float32(m_at, i, 2, m_new)
        store_bfloat16(p_at, i, 0, p_new)


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
            row = rows + word(row_index, tensor) * 48
            start, stop = word(chunks, 3 * chunk + 1), word(chunks, 3 * chunk + 2)
            elements(word(job, 19), tensors, tensor, row, start, stop)
    fetch_add(job + 64, -1)
