"""Rprop by the mlx backend: p:f16 g:f16 prev:f32 delta:f32. Printed by rulec."""

import mlx.core as mx
from rulec_backends.mlx.words import sign


def step(p_stored, g_stored, prev, delta, eta_minus, eta_plus, step_min, step_max):
    """New values of one tensor's buffers, in float32. Arrays are of one shape, scalars 0-d."""
    p = p_stored.astype(mx.float32)
    g = g_stored.astype(mx.float32)
    s = g * prev
    x1 = s < 0.0
    prev_new = mx.where(x1, mx.array(0.0, mx.float32), g)
    eta = mx.where(s > 0.0, eta_plus, mx.where(x1, eta_minus, mx.array(1.0, mx.float32)))
    delta_new = mx.minimum(mx.maximum(delta * eta, step_min), step_max)
    p_new = p - sign(prev_new) * delta_new
    return {'prev': prev_new, 'delta': delta_new, 'p': p_new}
