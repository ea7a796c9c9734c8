"""AdamW by the numpy backend: p:f32 g:f32 m:f32 v:f32. Printed by rulec."""


def step(
    xp, real, p, g, m, v, beta1, one_minus_beta1, beta2, one_minus_beta2, one_minus_beta1_t, sqrt_one_minus_beta2_t,
    eps, weight_decay, lr,
):
    """Update one tensor in place. Arrays are of one shape, scalars 0-d; computed in float32.

    `xp` is the arrays' namespace, `real` makes float32 of a number or an array.
    """
    m_new = beta1 * m + one_minus_beta1 * g
    v_new = beta2 * v + one_minus_beta2 * g * g
    m_hat = m_new / one_minus_beta1_t
    sigma = xp.sqrt(v_new) / sqrt_one_minus_beta2_t
    adam_direction = m_hat / (sigma + eps)
    decay_direction = weight_decay * p
    direction = adam_direction + decay_direction
    p_new = p - lr * direction
    m[...] = m_new
    v[...] = v_new
    p[...] = p_new
