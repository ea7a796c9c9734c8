"""Prodigy by the numpy backend: p:f32 g:f32 m:f32 v:f32 s:f32 x0:f32. Printed by rulec."""


def stage_0(xp, real, p, g, s, x0, beta3, s_new_factor, a):
    """Stage 0 of 2 for one tensor. Arrays are of one shape, scalars 0-d; computed in float32.

    `xp` is the arrays' namespace, `real` makes float32 of a number or an array.
    """
    s_new = beta3 * s + s_new_factor * g
    sum_a_g_x0_minus_p_model = xp.sum(a * g * (x0 - p), dtype=xp.float64)
    total = xp.sum(xp.abs(s_new), dtype=xp.float64)
    s[...] = s_new
    return {"sum_a_g_x0_minus_p_model": sum_a_g_x0_minus_p_model, "total": total}


def stage_1(xp, real, p, g, m, v, beta1, beta2, one_minus_beta2, weight_decay, one_minus_beta1_d, d_2, a, d_new_eps):
    """Stage 1 of 2 for one tensor. Arrays are of one shape, scalars 0-d; computed in float32.

    `xp` is the arrays' namespace, `real` makes float32 of a number or an array.
    """
    m_new = beta1 * m + one_minus_beta1_d * g
    x1 = d_2 * g
    v_new = beta2 * v + one_minus_beta2 * x1 * x1
    p_new = p - a * (m_new / (xp.sqrt(v_new) + d_new_eps) + weight_decay * p)
    m[...] = m_new
    v[...] = v_new
    p[...] = p_new
