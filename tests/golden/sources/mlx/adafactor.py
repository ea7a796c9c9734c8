"""Adafactor by the mlx backend: p:f32 g:f32 r:f32 c:f32. Printed by rulec."""

import mlx.core as mx
from rulec_backends.mlx.words import total


def stage_0(rows, cols, p, g):
    """Stage 0 of 3 for one tensor, and reductions in float64 on the CPU, float32 elsewhere.

    Arrays are of the tensor's shape or with 1 for some axes, scalars 0-d; computed in float32.
    `rows` are the axes that hold the tensor's rows, `cols` those of its columns.
    """
    x0 = g * g
    sum_g_squared_row = total(x0, cols)
    sum_g_squared_col = total(x0, rows)
    sum_p_squared = total(p * p)
    return {}, {'sum_g_squared_row': sum_g_squared_row, 'sum_g_squared_col': sum_g_squared_col, 'sum_p_squared': sum_p_squared}


def stage_1(g, a, b, one_over_eps1):
    """Stage 1 of 3 for one tensor, and reductions in float64 on the CPU, float32 elsewhere.

    Arrays are of the tensor's shape or with 1 for some axes, scalars 0-d; computed in float32.
    """
    u = g * mx.minimum(a * b, one_over_eps1)
    sum_u_squared = total(u * u)
    return {}, {'sum_u_squared': sum_u_squared}


def stage_2(p, g, a, b, lr_weight_decay, one_over_eps1, p_new_factor):
    """Stage 2 of 3 for one tensor.

    Arrays are of the tensor's shape or with 1 for some axes, scalars 0-d; computed in float32.
    """
    p_new = p - lr_weight_decay * p
    u = g * mx.minimum(a * b, one_over_eps1)
    p_new_ = p_new - p_new_factor * u
    return {'p': p_new_}
