"""Adafactor by the numpy backend: p:f32 g:f32 r:f32 c:f32. Printed by rulec."""


def stage_0(xp, real, p, g):
    """Stage 0 of 3 for one tensor. Arrays are (batch, rows, cols) or less, scalars 0-d; computed in float32.

    `xp` is the arrays' namespace, `real` makes float32 of a number or an array.
    """
    x0 = g * g
    sum_g_squared_row = xp.sum(x0, axis=2, keepdims=True, dtype=xp.float64)
    sum_g_squared_col = xp.sum(x0, axis=1, keepdims=True, dtype=xp.float64)
    sum_p_squared = xp.sum(p * p, dtype=xp.float64)
    return {"sum_g_squared_row": sum_g_squared_row, "sum_g_squared_col": sum_g_squared_col, "sum_p_squared": sum_p_squared}


def stage_1(xp, real, g, a, b, one_over_eps1):
    """Stage 1 of 3 for one tensor. Arrays are (batch, rows, cols) or less, scalars 0-d; computed in float32.

    `xp` is the arrays' namespace, `real` makes float32 of a number or an array.
    """
    u = g * xp.minimum(a * b, one_over_eps1)
    sum_u_squared = xp.sum(u * u, dtype=xp.float64)
    return {"sum_u_squared": sum_u_squared}


def stage_2(xp, real, p, g, a, b, lr_weight_decay, one_over_eps1, p_new_factor):
    """Stage 2 of 3 for one tensor. Arrays are (batch, rows, cols) or less, scalars 0-d; computed in float32.

    `xp` is the arrays' namespace, `real` makes float32 of a number or an array.
    """
    p_new = p - lr_weight_decay * p
    u = g * xp.minimum(a * b, one_over_eps1)
    p_new_ = p_new - p_new_factor * u
    p[...] = p_new_
