"""Lion by the mlx backend: p:bf16 g:bf16 m:f32. Printed by rulec."""

import mlx.core as mx
from rulec_backends.mlx.words import sign


def step(p_stored, g_stored, m, beta2, one_minus_beta2, beta1, one_minus_beta1, weight_decay, lr):
    """New values of one tensor's buffers, in float32. Arrays are of one shape, scalars 0-d."""
    p = p_stored.astype(mx.float32)
    g = g_stored.astype(mx.float32)
    m_new = beta2 * m + one_minus_beta2 * g
    c = beta1 * m + one_minus_beta1 * g
    direction = sign(c) + weight_decay * p
    p_new = p - lr * direction
    return {'m': m_new, 'p': p_new}
