"""LAMB by the mlx backend: p:f32 g:f32 m:f32 v:f32. Printed by rulec."""

import mlx.core as mx
from rulec_backends.mlx.words import total


def stage_0(
    p, g, m, v, beta1, one_minus_beta1, beta2, one_minus_beta2, one_minus_beta1_t, sqrt_one_minus_beta2_t, eps,
    weight_decay,
):
    """Stage 0 of 2 for one tensor, and reductions in float64 on the CPU, float32 elsewhere.

    Arrays are of one shape, scalars 0-d; computed in float32.
    """
    m_new = beta1 * m + one_minus_beta1 * g
    v_new = beta2 * v + one_minus_beta2 * g * g
    m_hat = m_new / one_minus_beta1_t
    sigma = mx.sqrt(v_new) / sqrt_one_minus_beta2_t
    adam_direction = m_hat / (sigma + eps)
    decay_direction = weight_decay * p
    adamw_direction = adam_direction + decay_direction
    sum_p_squared = total(p * p)
    sum_adamw_direction_squared = total(adamw_direction * adamw_direction)
    return {'m': m_new, 'v': v_new}, {'sum_p_squared': sum_p_squared, 'sum_adamw_direction_squared': sum_adamw_direction_squared}


def stage_1(p, m, v, one_minus_beta1_t, sqrt_one_minus_beta2_t, eps, weight_decay, lr, trust_ratio_direction_factor):
    """Stage 1 of 2 for one tensor.

    Arrays are of one shape, scalars 0-d; computed in float32.
    """
    m_hat = m / one_minus_beta1_t
    sigma = mx.sqrt(v) / sqrt_one_minus_beta2_t
    adam_direction = m_hat / (sigma + eps)
    decay_direction = weight_decay * p
    adamw_direction = adam_direction + decay_direction
    trust_ratio_direction = adamw_direction * trust_ratio_direction_factor
    p_new = p - lr * trust_ratio_direction
    return {'p': p_new}
