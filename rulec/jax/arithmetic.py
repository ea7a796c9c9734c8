"""The elementwise operations of the language on JAX arrays, as `rulec.language.arithmetic` defines them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rulec.language.node import Op


def _power(x: Any, y: Any) -> Any:
    return jnp.power(jnp.asarray(x, _float(x)), jnp.asarray(y, _float(y)))


def _float(x: Any) -> Any:
    return jnp.result_type(x, jnp.float32) if jnp.issubdtype(jnp.result_type(x), jnp.inexact) else jnp.float64


def _cbrt(x: Any) -> Any:
    """The cube root, with the sign of x; zero where x is subnormal, for which XLA may find the wrong sign."""
    x = jnp.asarray(x)
    return jnp.where(jnp.abs(x) < np.finfo(x.dtype).tiny, 0.0 * x, jnp.cbrt(x))


def _where(condition: Any, a: Any, b: Any) -> Any:
    """Truth from the scalar table is a number."""
    return jnp.where(jnp.asarray(condition) != 0, a, b)


def _truth(function: Callable[..., Any]) -> Callable[..., Any]:
    def of_truth(*operands: Any) -> Any:
        return function(*(jnp.asarray(x) != 0 for x in operands))

    return of_truth


def _meeting(function: Callable[..., Any]) -> Callable[..., Any]:
    """Numbers take the dtype of the arrays that they meet."""

    @functools.wraps(function)
    def met(*operands: Any) -> Any:
        wide = [x for x in operands if getattr(x, "ndim", 0) and jnp.issubdtype(x.dtype, jnp.floating)]
        if not wide:
            return function(*operands)
        dtype = jnp.result_type(*(x.dtype for x in wide))
        return function(*(_of(dtype, x) for x in operands))

    return met


def _of(dtype: Any, x: Any) -> Any:
    number = not getattr(x, "ndim", 0) and jnp.issubdtype(jnp.result_type(x), jnp.floating)
    return jnp.asarray(x).astype(dtype) if number else x


_OWN: Mapping[Op, Callable[..., Any]] = {
    Op.ADD: jnp.add, Op.SUB: jnp.subtract, Op.MUL: jnp.multiply, Op.DIV: jnp.divide, Op.POW: _power,
    Op.MOD: jnp.remainder, Op.FLOORDIV: lambda a, b: jnp.floor(jnp.divide(a, b)), Op.NEG: jnp.negative,
    Op.LT: jnp.less, Op.LE: jnp.less_equal, Op.GT: jnp.greater, Op.GE: jnp.greater_equal,
    Op.EQ: jnp.equal, Op.NE: jnp.not_equal,
    Op.AND: _truth(jnp.logical_and), Op.OR: _truth(jnp.logical_or), Op.NOT: _truth(jnp.logical_not),
    Op.WHERE: _where, Op.SQRT: jnp.sqrt, Op.RSQRT: lambda x: 1 / jnp.sqrt(x), Op.CBRT: _cbrt,
    Op.ABS: jnp.abs, Op.SIGN: jnp.sign, Op.EXP: jnp.exp, Op.LOG: jnp.log, Op.TANH: jnp.tanh,
    Op.SIGMOID: jax.nn.sigmoid, Op.ERF: jax.scipy.special.erf, Op.FLOOR: jnp.floor, Op.ISFINITE: jnp.isfinite,
    Op.MINIMUM: jnp.minimum, Op.MAXIMUM: jnp.maximum,
}  # fmt: skip

#: The operations, in the arrays' own dtype.
ARITHMETIC: Mapping[Op, Callable[..., Any]] = {op: _meeting(function) for op, function in _OWN.items()}
