"""Lion by the numpy backend: p:bf16 g:bf16 m:f32. Printed by rulec."""


def step(xp, real, p_stored, g_stored, m, beta2, one_minus_beta2, beta1, one_minus_beta1, weight_decay, lr):
    """Update one tensor in place. Arrays are of one shape, scalars 0-d; computed in float32.

    `xp` is the arrays' namespace, `real` makes float32 of a number or an array.
    """
    p = real(p_stored)
    g = real(g_stored)
    m_new = beta2 * m + one_minus_beta2 * g
    c = beta1 * m + one_minus_beta1 * g
    direction = xp.sign(c) + weight_decay * p
    p_new = p - lr * direction
    m[...] = m_new
    p_stored[...] = xp.asarray(p_new, dtype=p_stored.dtype)
