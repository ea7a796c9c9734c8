"""LAMB: the cpu kernel for p:f32 g:f32 m:f32 v:f32, 2 stages. Printed by rulec."""

from rulec_backends.cpu.words import (
    accumulate, compiled, fetch_add, float32, load_float32, number, sqrt, store_float32, store_float64, word,
)


@compiled
def stage_0(pointers, tensors, tensor, row, chunk, place):
    """One chunk: stores m, v; reduces to sum_p_squared per tensor, sum_adamw_direction_squared per tensor.
    Buffers do not overlap.
    """
    start, stop = word(place, 1), word(place, 2)
    p_at = word(pointers, tensor)
    g_at = word(pointers, tensors + tensor)
    m_at = word(pointers, 2 * tensors + tensor)
    v_at = word(pointers, 3 * tensors + tensor)
    sum_p_squared_at = word(pointers, 4 * tensors + tensor)
    sum_adamw_direction_squared_at = word(pointers, 5 * tensors + tensor)
    beta1 = float32(number(row, 0))
    one_minus_beta1 = float32(number(row, 1))
    beta2 = float32(number(row, 2))
    one_minus_beta2 = float32(number(row, 3))
    one_minus_beta1_t = float32(number(row, 4))
    sqrt_one_minus_beta2_t = float32(number(row, 5))
    eps = float32(number(row, 6))
    weight_decay = float32(number(row, 7))
    sum_p_squared = 0.0
    sum_adamw_direction_squared = 0.0
    for i in range(start, stop):
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
        adamw_direction = adam_direction + decay_direction
        store_float32(m_at, i, 2, m_new)
        store_float32(v_at, i, 3, v_new)
        sum_p_squared = accumulate(sum_p_squared, p * p)
        sum_adamw_direction_squared = accumulate(sum_adamw_direction_squared, adamw_direction * adamw_direction)
    store_float64(sum_p_squared_at, chunk, 4, sum_p_squared)
    store_float64(sum_adamw_direction_squared_at, chunk, 5, sum_adamw_direction_squared)


@compiled
def stage_1(pointers, tensors, tensor, row, chunk, place):
    """One chunk: stores p. Buffers do not overlap."""
    start, stop = word(place, 1), word(place, 2)
    p_at = word(pointers, tensor)
    m_at = word(pointers, 2 * tensors + tensor)
    v_at = word(pointers, 3 * tensors + tensor)
    one_minus_beta1_t = float32(number(row, 4))
    sqrt_one_minus_beta2_t = float32(number(row, 5))
    eps = float32(number(row, 6))
    weight_decay = float32(number(row, 7))
    lr = float32(number(row, 8))
    trust_ratio_direction_factor = float32(number(row, 9))
    for i in range(start, stop):
        p = load_float32(p_at, i, 0)
        m = load_float32(m_at, i, 2)
        v = load_float32(v_at, i, 3)
        m_hat = m / one_minus_beta1_t
        sigma = sqrt(v) / sqrt_one_minus_beta2_t
        adam_direction = m_hat / (sigma + eps)
        decay_direction = weight_decay * p
        adamw_direction = adam_direction + decay_direction
        trust_ratio_direction = adamw_direction * trust_ratio_direction_factor
        p_new = p - lr * trust_ratio_direction
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
            row = rows + word(row_index, tensor) * 80
            if stage == 0:
                stage_0(pointers, tensors, tensor, row, chunk, place)
            if stage == 1:
                stage_1(pointers, tensors, tensor, row, chunk, place)
    fetch_add(job + 64, -1)
