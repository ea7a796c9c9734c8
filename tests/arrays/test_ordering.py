"""Sorted values, places in order and values at places, in every library: beside NumPy's and torch's stable sorts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
import torch

import rulec.math as rm
from rulec.array_api import ordering
from rulec.array_api.functions import Functions
from rulec.array_api.numpy import NUMPY_MATRIX
from rulec.compiler.matrix import EXACT_MATRIX
from rulec.errors import TensorError
from rulec.language.expr.arithmetic import mpmath_context
from rulec.language.expr.node import Op
from tests.arrays.test_linear import LIBRARIES

Array = np.ndarray[Any, Any]

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in mpf")

LEVELS = ("row", "col", "matrix", "tensor")
NAN, INF = np.nan, np.inf

#: Equal elements, zeros of both signs, infinities, subnormal numbers, NaN of both signs, and rows of NaN alone.
SPECIAL = np.array([
    [[3.0, 1, NAN, -0.0, 0.0, 1], [0.0, -0.0, 2, INF, -INF, 2], [5, 5, 5, 5, 5, 5], [NAN, NAN, -NAN, NAN, NAN, NAN]],
    [[1e-310, -1e-310, 0, 5e-324, 1, -1], [-INF, NAN, INF, -INF, INF, 0], [2, 1, 2, 1, 2, 1], [-3, -2, -1, 0, 1, 2]],
])  # fmt: skip
WHOLE = np.random.default_rng(3).integers(-4, 5, size=(2, 30, 40)).astype(float)
SHAPES = {"special": SPECIAL, "whole": WHOLE, "one": WHOLE[:1, :1, :1], "nothing": WHOLE[:, :0], "none": WHOLE[:0]}


def lines_of(x: Array, per: str) -> Array:
    """The elements of a level along the last axis."""
    if per == "tensor":
        return x.reshape(1, 1, -1)
    return {"row": x, "col": x.swapaxes(1, 2), "matrix": x.reshape(len(x), 1, x.shape[1] * x.shape[2])}[per]


def matrices_of(lines: Array, shape: tuple[int, ...], per: str) -> Array:
    return lines if per == "row" else lines.swapaxes(1, 2) if per == "col" else lines.reshape(shape)


def by_numpy(op: Op, x: Array, per: str) -> Array:
    lines = lines_of(x, per)
    places = np.argsort(lines, axis=-1, kind="stable")
    found = places.astype(x.dtype) if op is Op.ARGSORT else np.take_along_axis(lines, places, -1)
    return matrices_of(found, x.shape, per)


def by_torch(op: Op, x: Array, per: str) -> Array:
    sorted_ = torch.sort(torch.from_numpy(lines_of(x, per).copy()), dim=-1, stable=True)
    found = sorted_.indices.to(sorted_.values.dtype) if op is Op.ARGSORT else sorted_.values
    return matrices_of(found.numpy(), x.shape, per)


def check_bits(found: Array, wanted: Array) -> None:
    """The same numbers, of which zeros have their signs; every NaN is one."""
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    np.testing.assert_array_equal(found, wanted)
    np.testing.assert_array_equal(np.signbit(found[found == 0]), np.signbit(wanted[wanted == 0]))


@pytest.mark.parametrize("peer", [by_numpy, by_torch])
@pytest.mark.parametrize("op", [Op.SORT, Op.ARGSORT])
@pytest.mark.parametrize("case", SHAPES)
def test_the_order_is_numpys_and_torchs(case: str, op: Op, peer: Callable[..., Array]) -> None:
    """Also by keys, as in libraries that are not NumPy."""
    function = {Op.SORT: ordering.sort, Op.ARGSORT: ordering.argsort}[op]
    for dtype in ("float32", "float64"):
        with np.errstate(over="ignore"):
            x = SHAPES[case].astype(dtype)
        for per in LEVELS:
            wanted = peer(op, x, per)
            check_bits(NUMPY_MATRIX[op](x, per=per), wanted)
            check_bits(function(_ByKeys(np), x, per), wanted)


class _ByKeys(Functions):
    """NumPy with the order of keys."""

    def order(self, words: Array) -> Array:
        return np.argsort(words, axis=-1, kind="stable")


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("op", [Op.SORT, Op.ARGSORT])
@pytest.mark.parametrize("per", LEVELS)
def test_the_order_is_one_in_every_library(per: str, op: Op, library: str) -> None:
    for x in (SPECIAL, SHAPES["nothing"]):
        check_bits(np.asarray(LIBRARIES[library](op, (x,), {"per": per})), by_numpy(op, x, per))


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("per", LEVELS)
def test_values_at_the_places_in_order_are_sorted(per: str, library: str) -> None:
    places = by_numpy(Op.ARGSORT, SPECIAL, per)
    found = np.asarray(LIBRARIES[library](Op.TAKE, (SPECIAL, places), {"per": per}))
    check_bits(found, by_numpy(Op.SORT, SPECIAL, per))


#: x, places, level, and the values there.
TAKEN: dict[str, tuple[Any, Any, str, Any]] = {
    "rows": ([[1, 2], [3, 4], [5, 6]], [[2], [0]], "col", [[5, 6], [1, 2]]),
    "columns": ([[1, 2], [3, 4]], [[1, 1, 0]], "row", [[2, 2, 1], [4, 4, 3]]),
    "a row": ([[1, 2], [3, 4]], 1, "col", [[3, 4]]),
    "a column": ([[1, 2], [3, 4]], 0, "row", [[1], [3]]),
    "one of each row": ([[1, 2], [3, 4]], [[1], [0]], "row", [[2], [3]]),
    "of a vector": ([[7], [8], [9]], [[2, 0]], "col", [[9, 7]]),
    "in order of rows": ([[1, 2], [3, 4]], [[3, 0, 2]], "matrix", [[4, 1, 3]]),
    "one": ([[1, 2], [3, 4]], 2, "tensor", [[3]]),
    "beyond the end": ([[1, 2, 3]], [[-1, 3, 2, 0.5, NAN, INF, 1e30]], "row", [[NAN, NAN, 3, NAN, NAN, NAN, NAN]]),
    "of nothing": ([[], []], [[0, 1]], "row", [[NAN, NAN], [NAN, NAN]]),
    "nothing": ([[1, 2]], [[], []], "matrix", [[], []]),
}


@pytest.mark.parametrize("library", [*LIBRARIES, "numpy", "fifty digits"])
@pytest.mark.parametrize("case", TAKEN)
def test_values_at_places(case: str, library: str) -> None:
    x, places, per, wanted = TAKEN[case]
    args = [y if isinstance(y, int) else np.array([y], float).reshape(1, len(y), -1) for y in (x, places)]
    if library == "fifty digits":
        exact = np.frompyfunc(mpmath_context().mpf, 1, 1)
        found = EXACT_MATRIX[Op.TAKE](*map(exact, args), per=per).astype(float)
    else:
        found = LIBRARIES.get(library, lambda op, y, words: NUMPY_MATRIX[op](*y, **words))(
            Op.TAKE, tuple(args), {"per": per}
        )
    np.testing.assert_array_equal(found, np.array([wanted], float).reshape(found.shape))
    assert found.shape[1:] == np.shape(wanted)


@pytest.mark.parametrize("op", [Op.SORT, Op.ARGSORT])
@pytest.mark.parametrize("per", LEVELS)
def test_fifty_digits_have_the_same_order(op: Op, per: str) -> None:
    exact = np.frompyfunc(mpmath_context().mpf, 1, 1)
    for x in (SPECIAL, WHOLE[:, :3, :4]):
        found = EXACT_MATRIX[op](exact(x), per=per).astype(float)
        np.testing.assert_array_equal(found, by_numpy(op, x, per))


def chosen_by_pairs(x: Array, k: Any) -> Array:
    """topk of rows by comparing every two values."""
    mine, other = x[..., :, None], x[..., None, :]
    before = (other > mine) | ((other == mine) & np.tril(np.ones((x.shape[-1],) * 2, bool), -1))
    marks = (before.sum(-1) < k).astype(x.dtype)
    return np.where(x == x, marks, NAN).astype(x.dtype)


@pytest.mark.parametrize("library", [*LIBRARIES, "numpy"])
def test_the_largest_are_those_of_comparing_every_two(library: str) -> None:
    call = LIBRARIES.get(library, lambda op, args, words: NUMPY_MATRIX[op](*args, **words))
    x = np.concatenate([SPECIAL.reshape(8, 1, 6), WHOLE[0, :8, None, :6]])
    each = np.arange(16.0).reshape(16, 1, 1) % 7
    for k in (each, *([0, 1, 3, 4.5, 6, 100] if library == "numpy" else [])):
        wanted = chosen_by_pairs(x, k)
        check_bits(np.asarray(call(Op.TOPK, (x, k), {})), wanted)
        check_bits(np.asarray(call(Op.TOPK, (x.swapaxes(1, 2), k), {})), wanted.swapaxes(1, 2))


def test_places_that_float32_cannot_count_are_refused() -> None:
    x = np.broadcast_to(np.float32(0), (1, 4097, 4096))
    with pytest.raises(TensorError, match=r"argsort counts 16781312 places in float32, .* up to 16777216: order rows"):
        NUMPY_MATRIX[Op.ARGSORT](x)
    assert NUMPY_MATRIX[Op.ARGSORT](x[:, :1], per="row")[0, 0, -1] == 4095


def test_a_traced_place_of_jax() -> None:
    from rulec.jax.library import MATRIX

    def ordered(x: Any, i: Any) -> Any:
        places = MATRIX[Op.ARGSORT](x, per="row")
        return MATRIX[Op.TAKE](MATRIX[Op.SORT](x, per="row"), i, per="row"), places

    with jax.enable_x64(True):
        x = jax.numpy.asarray(SPECIAL, jax.numpy.float32)
        found, places = jax.jit(ordered)(x, 2.0)
    np.testing.assert_array_equal(found, by_numpy(Op.SORT, SPECIAL.astype("float32"), "row")[..., 2:3])
    assert places.dtype == jax.numpy.float32


def test_python_orders_arrays_of_any_shape() -> None:
    x = np.array([3.0, 1.0, NAN, 2.0])
    np.testing.assert_array_equal(rm.sort(x), [1, 2, 3, NAN])
    np.testing.assert_array_equal(rm.argsort(x), [1, 3, 0, 2])
    np.testing.assert_array_equal(rm.take(x, [3, 0]), [2, 3])
    assert rm.take(x, 1) == 1
    np.testing.assert_array_equal(rm.take(WHOLE[0], 2, axis=0), WHOLE[0, 2:3])
    np.testing.assert_array_equal(rm.sort(WHOLE, per="col"), np.sort(WHOLE, axis=1))
    many = WHOLE.reshape(2, 3, 10, 40)
    np.testing.assert_array_equal(rm.sort(many, per="row"), np.sort(many))
    np.testing.assert_array_equal(rm.take(many, rm.argsort(many)), np.sort(many.reshape(-1)).reshape(many.shape))
