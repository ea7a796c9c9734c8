"""Adafactor by the numpy backend: p:f32 g:f32 r:f32 c:f32. Printed by rulec."""


def stage_0(xp, real, p, g):
    """Stage 0 of 3 for one tensor. Arrays are (batch, rows, cols) or less, scalars 0-d; computed in float32.

    `xp` is the arrays' namespace, `real` makes float32 of a number or an array.
    """
    x0 = g * g
    sum_row = xp.sum(x0, axis=2, keepdims=True, dtype=xp.float64)
    sum_col = xp.sum(x0, axis=1, keepdims=True, dtype=xp.float64)
    sum_tensor = xp.sum(p * p, dtype=xp.float64)
    return {"sum_row": sum_row, "sum_col": sum_col, "sum_tensor": sum_tensor}


def stage_1(xp, real, g, r_new, c_new, maximum, scalar_8):
    """Stage 1 of 3 for one tensor. Arrays are (batch, rows, cols) or less, scalars 0-d; computed in float32.

    `xp` is the arrays' namespace, `real` makes float32 of a number or an array.
    """
    s = r_new * c_new / maximum
    u = g / xp.sqrt(xp.maximum(s, scalar_8))
    sum_tensor_2 = xp.sum(u * u, dtype=xp.float64)
    return {"sum_tensor_2": sum_tensor_2}


def stage_2(xp, real, p, g, r_new, c_new, maximum, scalar_3, scalar_8, alpha, scalar_1):
    """Stage 2 of 3 for one tensor. Arrays are (batch, rows, cols) or less, scalars 0-d; computed in float32.

    `xp` is the arrays' namespace, `real` makes float32 of a number or an array.
    """
    p_new = p - scalar_3 * p
    s = r_new * c_new / maximum
    u = g / xp.sqrt(xp.maximum(s, scalar_8))
    p_new_ = p_new - alpha * u / scalar_1
    p[...] = p_new_
