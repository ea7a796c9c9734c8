"""Rprop by the numpy backend: p:f16 g:f16 prev:f32 delta:f32. Printed by rulec."""


def step(xp, real, p_stored, g_stored, prev, delta, eta_minus, eta_plus, step_min, step_max):
    """Update one tensor in place. Arrays are of one shape, scalars 0-d; computed in float32.

    `xp` is the arrays' namespace, `real` makes float32 of a number or an array.
    """
    p = real(p_stored)
    g = real(g_stored)
    s = g * prev
    x1 = s < 0.0
    prev_new = xp.where(x1, real(0.0), g)
    eta = xp.where(s > 0.0, eta_plus, xp.where(x1, eta_minus, real(1.0)))
    delta_new = xp.minimum(xp.maximum(delta * eta, step_min), step_max)
    p_new = p - xp.sign(prev_new) * delta_new
    prev[...] = prev_new
    delta[...] = delta_new
    p_stored[...] = xp.asarray(p_new, dtype=p_stored.dtype)
