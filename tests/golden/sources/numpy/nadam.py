"""NAdam by the numpy backend: p:f64 g:f64 m:f64 v:f64. Printed by rulec."""


def step(
    xp, real, p, g, m, v, beta1, one_minus_beta1, beta2, one_minus_beta2, m_bar_factor, m_bar_factor_2,
    sqrt_one_minus_beta2_t, eps, lr,
):
    """Update one tensor in place. Arrays are of one shape, scalars 0-d; computed in float64.

    `xp` is the arrays' namespace, `real` makes float64 of a number or an array.
    """
    m_new = beta1 * m + one_minus_beta1 * g
    v_new = beta2 * v + one_minus_beta2 * g * g
    m_bar = m_bar_factor * g + m_bar_factor_2 * m_new
    sigma = xp.sqrt(v_new) / sqrt_one_minus_beta2_t
    direction = m_bar / (sigma + eps)
    p_new = p - lr * direction
    m[...] = m_new
    v[...] = v_new
    p[...] = p_new
