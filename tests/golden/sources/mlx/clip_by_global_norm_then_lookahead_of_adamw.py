"""ClipByGlobalNormThenLookaheadAdamW by the mlx backend: p:f32 g:f32 m:f32 v:f32 slow:f32. Printed by rulec."""

import mlx.core as mx
from rulec_backends.mlx.words import total


def stage_0(g):
    """Stage 0 of 2 for one tensor, and reductions in float64 on the CPU, float32 elsewhere.

    Arrays are of one shape, scalars 0-d; computed in float32.
    """
    sum_g_squared_model = total(g * g)
    return {}, {'sum_g_squared_model': sum_g_squared_model}


def stage_1(
    p, g, m, v, slow, beta1, one_minus_beta1, beta2, one_minus_beta2, one_minus_beta1_t, sqrt_one_minus_beta2_t,
    eps, weight_decay, lr, alpha, t_mod_k_is_zero, clip_by_global_norm_direction_factor,
):
    """Stage 1 of 2 for one tensor.

    Arrays are of one shape, scalars 0-d; computed in float32.
    """
    t_mod_k_is_zero = t_mod_k_is_zero != 0
    clip_by_global_norm_direction = g * clip_by_global_norm_direction_factor
    m_new = beta1 * m + one_minus_beta1 * clip_by_global_norm_direction
    v_new = beta2 * v + one_minus_beta2 * clip_by_global_norm_direction * clip_by_global_norm_direction
    m_hat = m_new / one_minus_beta1_t
    sigma = mx.sqrt(v_new) / sqrt_one_minus_beta2_t
    adam_direction = m_hat / (sigma + eps)
    decay_direction = weight_decay * p
    adamw_direction = adam_direction + decay_direction
    adamw_p = p - lr * adamw_direction
    slow_new = slow + alpha * (adamw_p - slow)
    slow_new_ = mx.where(t_mod_k_is_zero, slow_new, slow)
    p_new = mx.where(t_mod_k_is_zero, slow_new, adamw_p)
    return {'m': m_new, 'v': v_new, 'slow': slow_new_, 'p': p_new}
