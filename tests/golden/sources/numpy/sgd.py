"""SGD by the numpy backend: p:f32 g:f32. Printed by rulec."""


def step(xp, real, p, g, lr):
    """Update one tensor in place. Arrays are of one shape, scalars 0-d; computed in float32.

    `xp` is the arrays' namespace, `real` makes float32 of a number or an array.
    """
    p_new = p - lr * g
    p[...] = p_new
