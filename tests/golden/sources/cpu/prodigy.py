"""Prodigy: the cpu kernel for p:f32 g:f32 m:f32 v:f32 s:f32 x0:f32, 2 stages. Printed by rulec."""

from rulec_backends.cpu.words import (
    accumulate, compiled, fetch_add, float32, load_float32, magnitude, number, sqrt, store_float32,
    store_float64, word,
)


@compiled
def stage_0(pointers, tensors, tensor, row, chunk, place):
    """One chunk: stores s; reduces to sum_a_g_x0_minus_p_model per tensor, total per tensor. Buffers do not
    overlap.
    """
    start, stop = word(place, 1), word(place, 2)
    p_at = word(pointers, tensor)
    g_at = word(pointers, tensors + tensor)
    s_at = word(pointers, 4 * tensors + tensor)
    x0_at = word(pointers, 5 * tensors + tensor)
    sum_a_g_x0_minus_p_model_at = word(pointers, 6 * tensors + tensor)
    total_at = word(pointers, 7 * tensors + tensor)
    beta3 = float32(number(row, 4))
    s_new_factor = float32(number(row, 16))
    a = float32(number(row, 17))
    sum_a_g_x0_minus_p_model = 0.0
    total = 0.0
    for i in range(start, stop):
        p = load_float32(p_at, i, 0)
        g = load_float32(g_at, i, 1)
        s = load_float32(s_at, i, 4)
        x0 = load_float32(x0_at, i, 5)
        s_new = beta3 * s + s_new_factor * g
        store_float32(s_at, i, 4, s_new)
        sum_a_g_x0_minus_p_model = accumulate(sum_a_g_x0_minus_p_model, a * g * (x0 - p))
        total = accumulate(total, magnitude(s_new))
    store_float64(sum_a_g_x0_minus_p_model_at, chunk, 6, sum_a_g_x0_minus_p_model)
    store_float64(total_at, chunk, 7, total)


@compiled
def stage_1(pointers, tensors, tensor, row, chunk, place):
    """One chunk: stores m, v, p. Buffers do not overlap."""
    start, stop = word(place, 1), word(place, 2)
    p_at = word(pointers, tensor)
    g_at = word(pointers, tensors + tensor)
    m_at = word(pointers, 2 * tensors + tensor)
    v_at = word(pointers, 3 * tensors + tensor)
    beta1 = float32(number(row, 0))
    beta2 = float32(number(row, 2))
    one_minus_beta2 = float32(number(row, 3))
    weight_decay = float32(number(row, 13))
    one_minus_beta1_d = float32(number(row, 14))
    d_2 = float32(number(row, 15))
    a = float32(number(row, 17))
    d_new_eps = float32(number(row, 18))
    for i in range(start, stop):
        p = load_float32(p_at, i, 0)
        g = load_float32(g_at, i, 1)
        m = load_float32(m_at, i, 2)
        v = load_float32(v_at, i, 3)
        m_new = beta1 * m + one_minus_beta1_d * g
        x1 = d_2 * g
        v_new = beta2 * v + one_minus_beta2 * x1 * x1
        p_new = p - a * (m_new / (sqrt(v_new) + d_new_eps) + weight_decay * p)
        store_float32(m_at, i, 2, m_new)
        store_float32(v_at, i, 3, v_new)
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
            row = rows + word(row_index, tensor) * 152
            if stage == 0:
                stage_0(pointers, tensors, tensor, row, chunk, place)
            if stage == 1:
                stage_1(pointers, tensors, tensor, row, chunk, place)
    fetch_add(job + 64, -1)
