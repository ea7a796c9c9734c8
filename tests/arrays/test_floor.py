"""A library of arrays by what every library gets for nothing: what is written once, beside NumPy's, the definition.

The library here has NumPy's functions and arrays that nothing can write to, as some frameworks have.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest

from rulec.array_api.functions import Functions, arithmetic, meeting
from rulec.array_api.library import Library
from rulec.array_api.matrix import matrix_functions
from rulec.array_api.numpy import NUMPY_MATRIX, NumpyLibrary
from rulec.errors import InternalError, RuleError
from rulec.language.expr.arithmetic import NUMPY
from rulec.language.expr.node import Kind, Op
from rulec.language.expr.ops import SPECS

Array = np.ndarray[Any, Any]


class Frozen(Functions):
    """NumPy's functions, on arrays that cannot be written; a number takes the dtype of the arrays it meets."""

    def fitted(self, x: Any, dtype: Any) -> Any:
        """As JAX's."""
        return x if dtype is None or getattr(x, "ndim", 0) else np.asarray(x, dtype)


FUNCTIONS = Frozen(np)
ARITHMETIC = arithmetic(FUNCTIONS, erf=NUMPY[Op.ERF], power=NUMPY[Op.POW])
MATRIX = matrix_functions(FUNCTIONS)


class FrozenLibrary(Library):
    """All of it inherited."""

    of = FUNCTIONS
    arithmetic = ARITHMETIC
    matrix = MATRIX


OURS, THEIRS = FrozenLibrary(), NumpyLibrary()

EDGES = [0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 1 / 3, 3.0, -7.0, 2.5, 1e-8, 1e16, 1e-310, 1e38, np.inf, -np.inf, np.nan]


def frozen(array: Array) -> Array:
    """The same numbers, which cannot be written."""
    array = array.copy()
    array.flags.writeable = False
    return array


def operands(op: Op, dtype: str) -> list[Array]:
    with np.errstate(all="ignore"):
        x, y = np.array([*itertools.product(EDGES, EDGES)], dtype).T
    if op is Op.WHERE:
        return [x > 0, x, y]
    return [x, y][: SPECS[op].arity]


def test_every_operation_and_matrix_function_is_there() -> None:
    """But for atan2, which is made of others before a library sees it, and indices, which a launch makes."""
    assert ARITHMETIC.keys() == NumpyLibrary.arithmetic.keys() - {Op.ATAN2}
    assert MATRIX.keys() == NUMPY_MATRIX.keys() == {op for op in Op if op.kind is Kind.MATRIX} - {Op.INDEX}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("op", [op for op in NUMPY if op is not Op.ATAN2], ids=lambda op: op.name.lower())
def test_operations_have_the_bits_of_the_definition(op: Op, dtype: str) -> None:
    given = [frozen(x) for x in operands(op, dtype)]
    with np.errstate(all="ignore"):
        found, wanted = ARITHMETIC[op](*given), NUMPY[op](*given)
    assert found.dtype == wanted.dtype
    np.testing.assert_array_equal(found, wanted)
    if wanted.dtype != bool:
        plain = ~np.isnan(wanted)
        np.testing.assert_array_equal(np.signbit(found[plain]), np.signbit(wanted[plain]))


def test_numbers_take_the_dtype_of_the_arrays_they_meet() -> None:
    multiply = meeting(FUNCTIONS, np.multiply)
    narrow, number = np.ones((1, 2, 2), np.float32), np.float64(0.1)
    assert multiply(narrow, number).dtype == np.float32
    assert multiply(narrow, np.asarray(0.1)).dtype == np.float32
    assert multiply(narrow, np.ones(2)).dtype == np.float64
    assert multiply(number, number).dtype == np.float64


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 5, 3), (3, 4, 4), (0, 3, 3), (2, 0, 3)], ids=str)
@pytest.mark.parametrize("broken", [1.0, np.nan, np.inf, 0.0])
def test_matrix_functions_have_the_bits_of_the_definition(shape: tuple[int, ...], dtype: str, broken: float) -> None:
    x = np.random.default_rng(1).normal(size=shape).astype(dtype)
    x[:1] *= np.asarray(broken, dtype)
    calls: list[tuple[Op, tuple[Any, ...], dict[str, Any]]] = [
        (Op.TRANSPOSE, (), {}), (Op.MATMUL, (np.swapaxes(x, 1, 2),), {}), (Op.NEWTON_SCHULZ, (3,), {})
    ]  # fmt: skip
    calls += [(Op.NEWTON_SCHULZ, (3,), {"dtype": asked}) for asked in ("float32", "float64", "bfloat16")]
    calls += [(Op.QR, (), {})] if shape[1] >= shape[2] else []
    calls += [(Op.SINGULAR_VECTORS, (1,), {})] if min(shape[1:]) else []
    if shape[1] == shape[2]:
        calls += [(Op.EIGH, (), {}), (Op.INVERSE_ROOT, (4, 1e-3), {}), (Op.INVERSE_ROOT, (np.asarray(2.0),), {})]
    for op, numbers, keywords in calls:
        with np.errstate(all="ignore"):
            found = MATRIX[op](frozen(x), *numbers, **keywords)
            wanted = NUMPY_MATRIX[op](x, *numbers, **keywords)
        assert found.dtype == wanted.dtype == dtype, op
        np.testing.assert_array_equal(found, wanted, err_msg=op.name)


def test_a_result_keeps_the_dtype_of_its_matrix_whatever_it_is_computed_in() -> None:
    x = np.random.default_rng(2).normal(size=(1, 4, 3))
    wide = NUMPY_MATRIX[Op.NEWTON_SCHULZ](x, 5, dtype="float64")
    narrow = NUMPY_MATRIX[Op.NEWTON_SCHULZ](x, 5, dtype="float32")
    assert wide.dtype == narrow.dtype == np.float64
    assert not np.array_equal(wide, narrow)
    np.testing.assert_array_equal(narrow, narrow.astype(np.float32))


@pytest.mark.parametrize("steps", [-1, 2.5, 101])
def test_iterations_are_counted(steps: float) -> None:
    with pytest.raises(RuleError, match="the number of steps of newton_schulz"):
        MATRIX[Op.NEWTON_SCHULZ](np.ones((1, 2, 2)), steps)


@pytest.mark.parametrize("op", [Op.UNIFORM, Op.NORMAL])
@pytest.mark.parametrize("count", [1, 13, 64])
@pytest.mark.parametrize("block", [0, 5, 1 << 33])
def test_random_numbers_are_the_language_s(op: Op, count: int, block: int) -> None:
    for step in (7, np.asarray(7.0)):
        position = {"seed": -3, "tensor": 5, "draw": 1, "step": step}
        np.testing.assert_array_equal(
            OURS.random(op, count, position, block), THEIRS.random(op, count, position, block)
        )


@pytest.mark.parametrize("op", [Op.SUM, Op.MIN, Op.MAX])
@pytest.mark.parametrize("axes", [(2,), (1,), (0, 1, 2), None, ()])
def test_reductions_over_something_and_over_nothing(op: Op, axes: tuple[int, ...] | None) -> None:
    values = np.random.default_rng(0).standard_normal((2, 3, 4)).astype(np.float32)
    for given in (values, values[:0], values[:, :, :0]):
        found, wanted = OURS.reduce(op, frozen(given), axes), THEIRS.reduce(op, given, axes)
        assert (np.shape(found), found.dtype) == (np.shape(wanted), np.float64)
        np.testing.assert_allclose(found, wanted, rtol=1e-14)


def test_arrays_are_joined_spread_taken_and_cast_as_by_numpy() -> None:
    m, v = frozen(np.arange(24, dtype=np.float32).reshape(2, 3, 4)), frozen(np.arange(6.0))
    numbers = [np.full((1, 1), 2.0), np.float32(3), v[5:]]
    turned = np.swapaxes(m, 1, 2)
    calls: list[Any] = [
        lambda library: library.stack([m, m]), lambda library: library.join([m, m], 1),
        lambda library: np.stack(library.split(m, 2)), lambda library: library.together(numbers),
        lambda library: library.spread(v[:1], (3, 4)), lambda library: library.take(v, np.array([1, 3])),
        lambda library: library.at(v, 2), lambda library: library.at(np.float64(3), 2),
        lambda library: library.cast(v, "float32"), lambda library: library.handed(m, "float64", True),
        lambda library: library.read(v.astype(np.float16)), lambda library: library.read(m),
        lambda library: library.copy(m), lambda library: library.constant(0.1), lambda library: library.numbers(v),
        lambda library: library.product(m, turned), lambda library: library.product(m, turned, m[:, :, :3] + 1),
    ]  # fmt: skip
    for call in calls:
        found, wanted = np.asarray(call(OURS)), np.asarray(call(THEIRS))
        assert found.dtype == wanted.dtype
        np.testing.assert_array_equal(found, wanted)


def test_what_cannot_be_written_is_not() -> None:
    before = np.zeros(3)
    with pytest.raises(InternalError, match="cannot be written"):
        OURS.write(before, np.ones(3))
    with pytest.raises(InternalError, match="cannot be written"):
        OURS.put(before, slice(0, 1), math.pi)
    assert not before.any()
