"""Rprop by the jax backend: p:f16 g:f16 prev:f32 delta:f32. Printed by rulec."""

import jax.numpy as jnp


def step(p_stored, g_stored, prev, delta, eta_minus, eta_plus, step_min, step_max):
    """New values of one tensor's buffers, in float32. Arrays are of one shape, scalars 0-d."""
    p = p_stored.astype(jnp.float32)
    g = g_stored.astype(jnp.float32)
    s = g * prev
    x1 = s < 0.0
    prev_new = jnp.where(x1, jnp.float32(0.0), g)
    eta = jnp.where(s > 0.0, eta_plus, jnp.where(x1, eta_minus, jnp.float32(1.0)))
    delta_new = jnp.minimum(jnp.maximum(delta * eta, step_min), step_max)
    p_new = p - jnp.sign(prev_new) * delta_new
    return {'prev': prev_new, 'delta': delta_new, 'p': p_new}
