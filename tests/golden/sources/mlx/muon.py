"""Muon by the mlx backend: p:f32 g:f32 m:f32 o_part:f32. Printed by rulec."""

import mlx.core as mx


def stage_0(g, m, momentum, one_minus_momentum):
    """Stage 0 of 2 for one tensor.

    Arrays are of one shape, scalars 0-d; computed in float32.
    """
    x0 = one_minus_momentum * g
    m_new = momentum * m + x0
    o_part_new = x0 + momentum * m_new
    return {'o_part': o_part_new, 'm': m_new}


def stage_1(p, o, sqrt_max_one_rows_over_cols, weight_decay, lr):
    """Stage 1 of 2 for one tensor.

    Arrays are of one shape, scalars 0-d; computed in float32.
    """
    direction = sqrt_max_one_rows_over_cols * o + weight_decay * p
    p_new = p - lr * direction
    return {'p': p_new}
