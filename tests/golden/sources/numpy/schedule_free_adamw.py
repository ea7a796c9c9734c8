"""ScheduleFreeAdamW by the numpy backend: p:f32 g:f32 z:f32 v:f32. Printed by rulec."""


def step(
    xp, real, p, g, z, v, beta2, one_minus_beta2, sqrt_one_minus_beta2_t, eps, weight_decay, gamma, scalar_6, c,
    scalar_8,
):
    """Update one tensor in place. Arrays are of one shape, scalars 0-d; computed in float32.

    `xp` is the arrays' namespace, `real` makes float32 of a number or an array.
    """
    v_new = beta2 * v + one_minus_beta2 * g * g
    d = g / (xp.sqrt(v_new) / sqrt_one_minus_beta2_t + eps) + weight_decay * p
    z_new = z - gamma * d
    p_new = scalar_6 * p + c * z + scalar_8 * d
    z[...] = z_new
    v[...] = v_new
    p[...] = p_new
