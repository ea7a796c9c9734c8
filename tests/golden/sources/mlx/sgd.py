"""SGD by the mlx backend: p:f32 g:f32. Printed by rulec."""

import mlx.core as mx


def step(p, g, lr):
    """New values of one tensor's buffers, in float32. Arrays are of one shape, scalars 0-d."""
    p_new = p - lr * g
    return {'p': p_new}
