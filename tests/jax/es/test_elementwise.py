"""Which traced functions are found to be elementwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import pytest

from rulec.jax.es.update import elementwise

OPERANDS = [jnp.ones((3, 3)), jnp.ones((3, 3)), jnp.ones(())]


@pytest.mark.parametrize(
    ("function", "found"),
    [
        (lambda a, b, n: [a * n + 2.0, jnp.where(n > 0, jnp.sqrt(b), b), n + 1], True),
        (lambda a, b, n: [jnp.maximum(a, jnp.full_like(a, n)), b, n], True),
        (lambda a, b, n: [jnp.flip(a), b, n], False),
        (lambda a, b, n: [jnp.cumsum(a, axis=0), b, n], False),
        (lambda a, b, n: [a.T, b, n], False),
        (lambda a, b, n: [a @ a, b, n], False),
        (lambda a, b, n: [a + b, b, n], False),
        (lambda a, b, n: [a / jnp.sum(a), b, n], False),
        (lambda a, b, n: [a * jnp.arange(3.0), b, n], False),
    ],
)
def test_a_function_of_arrays_and_a_number(function: Callable[..., Any], found: bool) -> None:
    apart = elementwise(function, OPERANDS, [0, 1, None])
    assert (apart is not None) is found
    if apart is not None:
        shared = apart.shared(OPERANDS)
        part = apart.of_owner(0, {0: jnp.full(2, 4.0)}, shared)
        assert jnp.array_equal(part[0], function(jnp.full(2, 4.0), jnp.ones(2), OPERANDS[2])[0])
