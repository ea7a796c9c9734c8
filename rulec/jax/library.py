"""The array library between the stages of a step that JAX traces: every function gives new arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp

from rulec.arrays.library import ArrayLibrary
from rulec.jax.arrays import ARITHMETIC, FUNCTIONS, MATRIX
from rulec.language.node import Op


class JaxLibrary(ArrayLibrary):
    """jnp on arrays and tracers, with JAX allowed 64 bits."""

    of = FUNCTIONS
    arithmetic: Mapping[Op, Callable[..., Any]] = ARITHMETIC
    matrix: Mapping[Op, Callable[..., Any]] = MATRIX

    def constant(self, value: float) -> Any:
        """A float64 number."""
        return jnp.float64(value)
