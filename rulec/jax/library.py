"""The array library between the stages of a step that JAX traces: every function gives new arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rulec.array_api.functions import arithmetic, meeting
from rulec.array_api.matrix import matrix_functions
from rulec.functional.library import PureFunctions, PureLibrary
from rulec.jax.xla import known_number
from rulec.language.expr.node import Op

_EXACT = jax.lax.Precision.HIGHEST


class JaxFunctions(PureFunctions):
    """jnp's functions. Numbers that steer an algorithm must not be traced."""

    def largest(self, x: Any) -> Any:
        """By an argmax of 32 bits: jnp's counts in 64 here, and a user's jit with 32-bit JAX cannot compile it."""
        place = jax.lax.argmax(jnp.abs(x), x.ndim - 2, jnp.int32)[..., None, :]
        return jnp.take_along_axis(x, place, axis=-2)

    def looked_up(self, table: Any, places: Any) -> Any:
        """Without a look for places outside of the table."""
        return jnp.asarray(table).at[places].get(mode="promise_in_bounds")

    def kept(self, x: Any) -> Any:
        """By an operation that XLA does not leave out, as it does two conversions in a row."""
        dtype = jnp.finfo(x.dtype)  # type: ignore[no-untyped-call]
        return jax.lax.reduce_precision(x, dtype.nexp, dtype.nmant)

    def known(self, number: Any, what: str) -> float:
        """RuleError where it is traced."""
        return known_number(number, what)

    def matmul(self, a: Any, b: Any) -> Any:
        """Of full precision."""
        return jnp.matmul(a, b, precision=_EXACT)

    def wide_matmul(self, a: Any, b: Any) -> Any:
        """A product that is not rounded to 16 bits."""
        return jnp.matmul(a, b, precision=_EXACT, preferred_element_type=jnp.promote_types(a.dtype, jnp.float32))

    def solve_upper(self, a: Any, b: Any) -> Any:
        """By XLA's triangular solve."""
        return jax.lax.linalg.triangular_solve(a, b, left_side=True)

    def eigh(self, x: Any) -> Any:
        """Of the lower triangle, as NumPy's."""
        return jnp.linalg.eigh(x, symmetrize_input=False)


def _power(x: Any, y: Any) -> Any:
    return jnp.power(jnp.asarray(x, _float(x)), jnp.asarray(y, _float(y)))


def _float(x: Any) -> Any:
    return jnp.result_type(x, jnp.float32) if jnp.issubdtype(jnp.result_type(x), jnp.inexact) else jnp.float64


def _cbrt(x: Any) -> Any:
    """The cube root, with the sign of x; zero where x is subnormal, for which XLA may find the wrong sign."""
    x = jnp.asarray(x)
    return jnp.where(jnp.abs(x) < np.finfo(x.dtype).tiny, 0.0 * x, jnp.cbrt(x))


FUNCTIONS = JaxFunctions(jnp)

_PLAIN = arithmetic(
    FUNCTIONS, power=_power, cbrt=_cbrt, sign=jnp.sign, sigmoid=jax.nn.sigmoid, erf=jax.scipy.special.erf
)

#: The operations, in the arrays' own dtype.
ARITHMETIC: Mapping[Op, Callable[..., Any]] = {op: meeting(FUNCTIONS, function) for op, function in _PLAIN.items()}

#: The matrix functions.
MATRIX: Mapping[Op, Callable[..., Any]] = matrix_functions(FUNCTIONS)


class JaxLibrary(PureLibrary):
    """jnp on arrays and tracers, with JAX allowed 64 bits."""

    of = FUNCTIONS
    arithmetic: Mapping[Op, Callable[..., Any]] = ARITHMETIC
    matrix: Mapping[Op, Callable[..., Any]] = MATRIX

    def placed(self, values: Any, places: Any, numbers: Any) -> Any:
        """By the update of an array."""
        return values.at[places].set(numbers)


LIBRARY = JaxLibrary()
evaluated = LIBRARY.evaluated
