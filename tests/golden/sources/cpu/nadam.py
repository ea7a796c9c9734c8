"""NAdam: the cpu kernel for p:f64 g:f64 m:f64 v:f64. Printed by rulec."""

from rulec_backends.cpu.words import (
    compiled, fetch_add, float64, load_float64, number, sqrt, store_float64, word,
)


@compiled
def elements(pointers, tensors, tensor, row, start, stop):
    """Elements start..stop of one tensor. Its buffers do not overlap."""
    p_at = word(pointers, tensor)
    g_at = word(pointers, tensors + tensor)
    m_at = word(pointers, 2 * tensors + tensor)
    v_at = word(pointers, 3 * tensors + tensor)
    beta1 = float64(number(row, 0))
    one_minus_beta1 = float64(number(row, 1))
    beta2 = float64(number(row, 2))
    one_minus_beta2 = float64(number(row, 3))
    m_bar_factor = float64(number(row, 4))
    m_bar_factor_2 = float64(number(row, 5))
    sqrt_one_minus_beta2_t = float64(number(row, 6))
    eps = float64(number(row, 7))
    lr = float64(number(row, 8))
    for i in range(start, stop):
        p = load_float64(p_at, i, 0)
        g = load_float64(g_at, i, 1)
        m = load_float64(m_at, i, 2)
        v = load_float64(v_at, i, 3)
        m_new = beta1 * m + one_minus_beta1 * g
        v_new = beta2 * v + one_minus_beta2 * g * g
        m_bar = m_bar_factor * g + m_bar_factor_2 * m_new
        sigma = sqrt(v_new) / sqrt_one_minus_beta2_t
        direction = m_bar / (sigma + eps)
        p_new = p - lr * direction
        store_float64(m_at, i, 2, m_new)
        store_float64(v_at, i, 3, v_new)
        store_float64(p_at, i, 0, p_new)


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
