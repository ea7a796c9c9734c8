"""Nesterov by the numpy backend: p:bf16 g:bf16 m:bf16. Printed by rulec."""


def step(xp, real, p_stored, g_stored, m_stored, momentum, lr):
    """Update one tensor in place. Arrays are of one shape, scalars 0-d; computed in float32.

    `xp` is the arrays' namespace, `real` makes float32 of a number or an array.
    """
    p = real(p_stored)
    g = real(g_stored)
    m = real(m_stored)
    m_new = momentum * m + g
    nesterov_momentum_direction = g + momentum * m_new
    p_new = p - lr * nesterov_momentum_direction
    m_stored[...] = xp.asarray(m_new, dtype=m_stored.dtype)
    p_stored[...] = xp.asarray(p_new, dtype=p_stored.dtype)
