"""What MLX arrays differ in from NumPy's, and what is worked out of them between the stages of a step.

float64 and decompositions are the CPU's alone: who calls these functions makes its stream the current one.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx

from rulec.arrays.arithmetic import arithmetic, meeting
from rulec.arrays.functions import Functions
from rulec.arrays.library import Array, ArrayLibrary
from rulec.arrays.matrix import matrix_functions
from rulec.errors import BackendUnsupported
from rulec.language.node import Op

words = importlib.import_module("rulec_backends.mlx.words")


class MlxFunctions(Functions):
    """mx's; numbers are float64 arrays, and matrices of 16 bits are multiplied as wide ones."""

    def cast(self, x: Any, dtype: Any) -> Any:
        """The array in another dtype, by its name or MLX's own."""
        return x.astype(getattr(mx, dtype) if isinstance(dtype, str) else dtype)

    def fitted(self, x: Any, dtype: Any) -> Any:
        """An array, in that dtype where it is one number with a point."""
        array = number(x) if not isinstance(x, mx.array) else x
        return array if dtype is None or array.ndim or not self.is_float(array) else array.astype(dtype)

    def product_dtype(self, x: Any, dtype: str) -> Any:
        """Any."""
        return getattr(mx, dtype)

    def beside(self, number: Any, x: Any) -> Any:
        """In the dtype of the matrix."""
        return self.fitted(number, x.dtype)

    def wide(self, x: Any) -> Any:
        """In at least 32 bits."""
        return x.astype(mx.result_type(x.dtype, mx.float32))

    def wide_matmul(self, a: Any, b: Any) -> Any:
        """A product that is not rounded to 16 bits."""
        return mx.matmul(self.wide(a), self.wide(b))

    def norm(self, x: Any, dtype: Any) -> Any:
        """Summed in the dtype that the matrices had."""
        return super().norm(x.astype(dtype), dtype).astype(x.dtype)

    def left_vectors(self, x: Any) -> Any:
        """The first of the full matrix."""
        return mx.linalg.svd(x)[0][..., : min(x.shape[-2:])]


def _erf(x: Any) -> Any:
    raise BackendUnsupported("mlx", "erf, of which MLX has three digits", "this rule")


FUNCTIONS = MlxFunctions(mx)

_PLAIN = arithmetic(FUNCTIONS, exp=words.exp, sigmoid=words.sigmoid, cbrt=words.cbrt, sign=words.sign, erf=_erf)


class MlxLibrary(ArrayLibrary):
    """mx on arrays and on what stands for them under `mx.compile`."""

    of = FUNCTIONS
    arithmetic: Mapping[Op, Callable[..., Any]] = {op: meeting(FUNCTIONS, function) for op, function in _PLAIN.items()}
    matrix: Mapping[Op, Callable[..., Any]] = matrix_functions(FUNCTIONS)

    def constant(self, value: float) -> Any:
        """A float64 number."""
        return number(value)

    def numbers(self, values: Any) -> Any:
        """An array as it is; numbers of Python and NumPy in float64."""
        return values if isinstance(values, mx.array) else number(values)

    def read(self, array: Any) -> Any:
        """The array itself, or in float32 one of 16 bits."""
        return FUNCTIONS.wide(array)

    def cast(self, values: Any, dtype: str) -> Any:
        """Values in another dtype."""
        return FUNCTIONS.cast(self.numbers(values), dtype)

    def take(self, values: Any, places: Array) -> Any:
        """The numbers at these places."""
        return values[mx.array(places)]

    def _words(self, count: int, first: int, *, draw: int, **position: Any) -> Any:
        # An integer of Python has no xor with an array to its right.
        return super()._words(count, first, draw=mx.array(draw, mx.int64), **position)  # type: ignore[arg-type]


def number(value: Any) -> Any:
    """A float64 array of a number or an array."""
    return value.astype(mx.float64) if isinstance(value, mx.array) else mx.array(value, mx.float64)


LIBRARY = MlxLibrary()
