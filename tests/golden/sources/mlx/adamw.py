"""AdamW by the mlx backend: p:f32 g:f32 m:f32 v:f32. Printed by rulec."""

import mlx.core as mx


def step(
    p, g, m, v, beta1, one_minus_beta1, beta2, one_minus_beta2, one_minus_beta1_t, sqrt_one_minus_beta2_t, eps,
    weight_decay, lr,
):
    """New values of one tensor's buffers, in float32. Arrays are of one shape, scalars 0-d."""
    m_new = beta1 * m + one_minus_beta1 * g
    v_new = beta2 * v + one_minus_beta2 * g * g
    m_hat = m_new / one_minus_beta1_t
    sigma = mx.sqrt(v_new) / sqrt_one_minus_beta2_t
    adam_direction = m_hat / (sigma + eps)
    decay_direction = weight_decay * p
    direction = adam_direction + decay_direction
    p_new = p - lr * direction
    return {'m': m_new, 'v': v_new, 'p': p_new}
