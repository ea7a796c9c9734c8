"""ScheduleFreeAdamW by the mlx backend: p:f32 g:f32 z:f32 v:f32. Printed by rulec."""

import mlx.core as mx


def step(
    p, g, z, v, beta2, one_minus_beta2, sqrt_one_minus_beta2_t, eps, weight_decay, gamma, one_minus_c, c,
    p_new_factor,
):
    """New values of one tensor's buffers, in float32. Arrays are of one shape, scalars 0-d."""
    v_new = beta2 * v + one_minus_beta2 * g * g
    d = g / (mx.sqrt(v_new) / sqrt_one_minus_beta2_t + eps) + weight_decay * p
    z_new = z - gamma * d
    p_new = one_minus_c * p + c * z + p_new_factor * d
    return {'z': z_new, 'v': v_new, 'p': p_new}
