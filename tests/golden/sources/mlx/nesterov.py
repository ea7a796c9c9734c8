"""Nesterov by the mlx backend: p:bf16 g:bf16 m:bf16. Printed by rulec."""

import mlx.core as mx


def step(p_stored, g_stored, m_stored, momentum, lr):
    """New values of one tensor's buffers, in float32. Arrays are of one shape, scalars 0-d."""
    p = p_stored.astype(mx.float32)
    g = g_stored.astype(mx.float32)
    m = m_stored.astype(mx.float32)
    m_new = momentum * m + g
    nesterov_momentum_direction = g + momentum * m_new
    p_new = p - lr * nesterov_momentum_direction
    return {'m': m_new, 'p': p_new}
