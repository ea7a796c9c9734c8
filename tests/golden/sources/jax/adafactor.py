"""Adafactor by the jax backend: p:f32 g:f32 r:f32 c:f32. Printed by rulec."""

import jax.numpy as jnp


def stage_0(rows, cols, p, g):
    """Stage 0 of 3 for one tensor, and reductions in float64.

    Arrays are of the tensor's shape or with 1 for some axes, scalars 0-d; computed in float32.
    `rows` are the axes that hold the tensor's rows, `cols` those of its columns.
    """
    x0 = g * g
    sum_row = jnp.sum(x0, axis=cols, keepdims=True, dtype=jnp.float64)
    sum_col = jnp.sum(x0, axis=rows, keepdims=True, dtype=jnp.float64)
    sum_tensor = jnp.sum(p * p, dtype=jnp.float64)
    return {}, {'sum_row': sum_row, 'sum_col': sum_col, 'sum_tensor': sum_tensor}


def stage_1(g, r_new, c_new, maximum, scalar_8):
    """Stage 1 of 3 for one tensor, and reductions in float64.

    Arrays are of the tensor's shape or with 1 for some axes, scalars 0-d; computed in float32.
    """
    s = r_new * c_new / maximum
    u = g / jnp.sqrt(jnp.maximum(s, scalar_8))
    sum_tensor_2 = jnp.sum(u * u, dtype=jnp.float64)
    return {}, {'sum_tensor_2': sum_tensor_2}


def stage_2(p, g, r_new, c_new, maximum, scalar_3, scalar_8, alpha, scalar_1):
    """Stage 2 of 3 for one tensor.

    Arrays are of the tensor's shape or with 1 for some axes, scalars 0-d; computed in float32.
    """
    p_new = p - scalar_3 * p
    s = r_new * c_new / maximum
    u = g / jnp.sqrt(jnp.maximum(s, scalar_8))
    p_new_ = p_new - alpha * u / scalar_1
    return {'p': p_new_}
