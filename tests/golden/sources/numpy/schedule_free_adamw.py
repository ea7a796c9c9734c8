"""ScheduleFreeAdamW by the numpy backend: p:f32 g:f32 z:f32 v:f32. Printed by rulec."""


def step(
    xp, real, p, g, z, v, beta2, one_minus_beta2, sqrt_one_minus_beta2_t, eps, weight_decay, gamma, one_minus_c, c,
    p_new_factor,
):
    """Update one tensor in place. Arrays are of one shape, scalars 0-d; computed in float32.

    `xp` is the arrays' namespace, `real` makes float32 of a number or an array.
    """
    v_new = beta2 * v + one_minus_beta2 * g * g
    d = g / (xp.sqrt(v_new) / sqrt_one_minus_beta2_t + eps) + weight_decay * p
    z_new = z - gamma * d
    p_new = one_minus_c * p + c * z + p_new_factor * d
    z[...] = z_new
    v[...] = v_new
    p[...] = p_new
