"""The array library between the stages of a step that JAX traces: every function gives new arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rulec.jax.arrays import ARITHMETIC, FUNCTIONS, MATRIX
from rulec.language.node import Op
from rulec.pure.library import PureLibrary


class JaxLibrary(PureLibrary):
    """jnp on arrays and tracers, with JAX allowed 64 bits."""

    of = FUNCTIONS
    arithmetic: Mapping[Op, Callable[..., Any]] = ARITHMETIC
    matrix: Mapping[Op, Callable[..., Any]] = MATRIX

    def placed(self, values: Any, places: Any, numbers: Any) -> Any:
        """By the update of an array."""
        return values.at[places].set(numbers)
