"""NAdam by the mlx backend: p:f64 g:f64 m:f64 v:f64. Printed by rulec."""

import mlx.core as mx


def step(
    p, g, m, v, beta1, one_minus_beta1, beta2, one_minus_beta2, m_bar_factor, m_bar_factor_2,
    sqrt_one_minus_beta2_t, eps, lr,
):
    """New values of one tensor's buffers, in float64. Arrays are of one shape, scalars 0-d."""
    m_new = beta1 * m + one_minus_beta1 * g
    v_new = beta2 * v + one_minus_beta2 * g * g
    m_bar = m_bar_factor * g + m_bar_factor_2 * m_new
    sigma = mx.sqrt(v_new) / sqrt_one_minus_beta2_t
    direction = m_bar / (sigma + eps)
    p_new = p - lr * direction
    return {'m': m_new, 'v': v_new, 'p': p_new}
