"""The array library between the stages of a step that JAX traces, and the options of XLA for a step.

Every function of the library returns new arrays. XLA is asked for options of compiled calls. Traced and known values,
and meshes of explicit axes, are recognised here.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from rulec.array_api.functions import arithmetic, meeting
from rulec.array_api.matrix import matrix_functions
from rulec.errors import RuleError
from rulec.functional.values import PureFunctions, PureLibrary
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

    def repeated(self, times: int, function: Callable[[Any], Any], start: Any) -> Any:
        """XLA has a loop for it."""
        return jax.lax.fori_loop(0, times, lambda _, value: function(value), start)

    def known(self, number: Any, what: str) -> float:
        """RuleError where it is traced."""
        return known_number(number, what)

    def matmul(self, a: Any, b: Any) -> Any:
        """The product in full precision."""
        return jnp.matmul(a, b, precision=_EXACT)

    def wide_matmul(self, a: Any, b: Any) -> Any:
        """A product that is not rounded to 16 bits."""
        return jnp.matmul(a, b, precision=_EXACT, preferred_element_type=jnp.promote_types(a.dtype, jnp.float32))

    def solve_upper(self, a: Any, b: Any) -> Any:
        """Solves by XLA's triangular solve."""
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

words = importlib.import_module("rulec_backends.jax.words")

_PLAIN = arithmetic(
    FUNCTIONS,
    power=_power,
    cbrt=_cbrt,
    sign=jnp.sign,
    sigmoid=jax.nn.sigmoid,
    erf=jax.scipy.special.erf,
    **words.FORMULAS,
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
        """Writes by the update of an array."""
        return values.at[places].set(numbers)


LIBRARY = JaxLibrary()
evaluated = LIBRARY.evaluated


#: That XLA, where it wants to write over an array that others read, looks for an order in which that does no harm:
#: without it XLA on the CPU copies the array first.
_OPTIONS = {"xla_cpu_copy_insertion_use_region_analysis": True}


@functools.cache
def compiler_options() -> dict[str, Any] | None:
    """The options of an outermost jit; None where this XLA has none of them."""
    if jax.default_backend() != "cpu":
        return None
    try:
        # Also where a transformation is first used while others trace it.
        with jax.ensure_compile_time_eval():
            jax.jit(lambda x: x + 1, compiler_options=_OPTIONS)(0.0)
    except jax.errors.JaxRuntimeError:
        return None
    return _OPTIONS


def is_outermost(*operands: Any) -> bool:
    """Whether a call with these operands is compiled on its own: JAX takes options there alone."""
    return not any(map(is_traced, jax.tree.leaves((operands, _new_here()))))


@jax.jit
def _new_here() -> Any:
    """An array that is a tracer exactly where this call is traced by another jit; the cheapest such array."""
    return jnp.zeros(())


def is_traced(value: Any) -> bool:
    """Whether a value is a tracer of JAX: unknown while a step is traced."""
    return isinstance(value, jax.core.Tracer)


def known_number(value: Any, what: str) -> float:
    """A number that must be known when a step is traced; RuleError where it is traced itself."""
    if is_traced(value):
        raise RuleError(
            f"{what} must be a Python number, and is traced here: close over it, or leave it out of inject_hyperparams"
        )
    return float(value)


def automatic(function: Callable[..., Any], operands: Any, specs: Any) -> Any:
    """The function's result; inside, XLA chooses how values are sharded, as on other meshes.

    `operands` is a tuple of trees, and `specs` is the sharding of each array of the result.
    """
    structure: Any
    leaves, structure = jax.tree.flatten(operands)
    mesh = _explicit(leaves)
    if mesh is None:
        return function(*operands)

    def inside(arrays: Any) -> Any:
        rest = iter(arrays)
        return function(*structure.unflatten(next(rest) if isinstance(x, jax.Array) else x for x in leaves))

    shardings = jax.tree.map(
        lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda x: isinstance(x, PartitionSpec)
    )
    sharded = jax.sharding.auto_axes(inside, axes=mesh.explicit_axes, out_sharding=shardings)
    return sharded([x for x in leaves if isinstance(x, jax.Array)])


def _explicit(leaves: Any) -> Any:
    """The mesh of explicit axes that arrays lie on; None where there is none."""
    for leaf in leaves:
        if isinstance(leaf, jax.Array):
            mesh: Any = jax.typeof(leaf).sharding.mesh
            if mesh.explicit_axes:
                return mesh
    return None


def specs_of(tree: Any) -> Any:
    """How each array of a tree is sharded."""
    return jax.tree.map(lambda x: jax.typeof(x).sharding.spec, tree)
