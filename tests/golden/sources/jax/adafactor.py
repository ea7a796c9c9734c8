"""Adafactor by the jax backend: p:f32 g:f32 r:f32 c:f32. Printed by rulec."""

import jax.numpy as jnp


def stage_0(rows, cols, p, g):
    """Stage 0 of 3 for one tensor, and reductions in float64.

    Arrays are of the tensor's shape or with 1 for some axes, scalars 0-d; computed in float32.
    `rows` are the axes that hold the tensor's rows, `cols` those of its columns.
    """
    x0 = g * g
    sum_g_squared_row = jnp.sum(x0, axis=cols, keepdims=True, dtype=jnp.float64)
    sum_g_squared_col = jnp.sum(x0, axis=rows, keepdims=True, dtype=jnp.float64)
    sum_p_squared = jnp.sum(p * p, dtype=jnp.float64)
    return {}, {'sum_g_squared_row': sum_g_squared_row, 'sum_g_squared_col': sum_g_squared_col, 'sum_p_squared': sum_p_squared}


def stage_1(g, a, b, one_over_eps1):
    """Stage 1 of 3 for one tensor, and reductions in float64.

    Arrays are of the tensor's shape or with 1 for some axes, scalars 0-d; computed in float32.
    """
    u = g * jnp.minimum(a * b, one_over_eps1)
    sum_u_squared = jnp.sum(u * u, dtype=jnp.float64)
    return {}, {'sum_u_squared': sum_u_squared}


def stage_2(p, g, a, b, lr_weight_decay, one_over_eps1, p_new_factor):
    """Stage 2 of 3 for one tensor.

    Arrays are of the tensor's shape or with 1 for some axes, scalars 0-d; computed in float32.
    """
    p_new = p - lr_weight_decay * p
    u = g * jnp.minimum(a * b, one_over_eps1)
    p_new_ = p_new - p_new_factor * u
    return {'p': p_new_}
