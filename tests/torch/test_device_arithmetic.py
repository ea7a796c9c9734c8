"""What torch computes on a device between the stages, beside what the language says it is."""

from __future__ import annotations

import itertools
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from rulec.array_api.numpy import NUMPY_MATRIX
from rulec.language.expr.arithmetic import NUMPY
from rulec.language.expr.node import Op
from rulec.language.expr.ops import SPECS
from rulec.torch.tensors.library import ARITHMETIC, DEVICE_MATRIX

EDGES = [
    0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 1 / 3, -1 / 3, 2.0, -2.0, 3.0, -3.0, 7.0, -7.0, 2.5, 1e-8, 1e16, 1e-310, -1e-45,
    1e38, -1e308, np.inf, -np.inf, np.nan,
]  # fmt: skip

UNARY = [op for op in NUMPY if SPECS[op].arity == 1 and op is not Op.NOT]
#: Of truth alone.
LOGICAL = {Op.AND, Op.OR, Op.NOT}
BINARY = [op for op in NUMPY if op not in {*UNARY, *LOGICAL, Op.WHERE, Op.ATAN2}]


def edges(dtype: str) -> np.ndarray[Any, Any]:
    with np.errstate(all="ignore"):
        return np.array(EDGES, dtype)


def tensor(value: Any) -> Tensor:
    """An array, or a number as one that is known here."""
    return torch.from_numpy(value) if isinstance(value, np.ndarray) else torch.tensor(value, dtype=torch.float64)


def assert_same(op: Op, *given: Any) -> None:
    """Truth, zeros with their signs, infinities and NaN as they are; other numbers within a few ulps."""
    with np.errstate(all="ignore"):
        wanted = np.asarray(NUMPY[op](*given))
    found = ARITHMETIC[op](*map(tensor, given)).numpy()
    assert found.dtype == wanted.dtype
    if wanted.dtype == bool:
        np.testing.assert_array_equal(found, wanted)
        return
    np.testing.assert_allclose(found, wanted, rtol=8 * np.finfo(wanted.dtype).eps, atol=0)
    if op in (Op.MINIMUM, Op.MAXIMUM):
        return  # NumPy itself gives either zero
    zero = wanted == 0
    np.testing.assert_array_equal(np.signbit(found[zero]), np.signbit(wanted[zero]))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("op", UNARY, ids=lambda op: op.name.lower())
def test_operations_of_one_number_are_the_language_s(op: Op, dtype: str) -> None:
    assert_same(op, edges(dtype))


def fits(op: Op, a: Any, b: Any) -> Any:
    """Where torch's CPU can tell in the place of a device: its vectors have no remainder of quotients beyond 2**52."""
    if op is not Op.MOD:
        return np.ones(np.broadcast(a, b).shape, bool)
    with np.errstate(all="ignore"):
        return ~(np.abs(np.divide(a, b)) > 2.0**52) | np.isinf(a) | (np.asarray(b) == 0)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("op", BINARY, ids=lambda op: op.name.lower())
def test_operations_of_two_numbers_are_the_language_s(op: Op, dtype: str) -> None:
    some = edges(dtype)
    a, b = np.array([*itertools.product(some, some)], dtype).T
    chosen = fits(op, a, b)
    assert_same(op, np.ascontiguousarray(a[chosen]), np.ascontiguousarray(b[chosen]))
    for known in (x for x in EDGES if dtype == "float64" or x == 0 or not abs(x) < 1e-38):
        assert_same(op, some[fits(op, some, known)], known)
        assert_same(op, known, some[fits(op, known, some)])


@pytest.mark.parametrize("exponent", [0.5, -0.5, 2.0, -1.0])
def test_powers_are_c_s_where_torch_takes_another_way_for_one_exponent(exponent: float) -> None:
    """As it does on a device, for a number on the CPU."""
    power = torch.pow

    def by_number(x: Tensor, y: Tensor) -> Tensor:
        return power(x, y.item() if y.dim() == 0 else y)

    with mock.patch.object(torch, "pow", by_number):
        assert_same(Op.POW, edges("float64"), exponent)


@pytest.mark.parametrize("where", ["condition", "first", "second"])
def test_a_choice_is_made_on_the_device_wherever_what_is_known_here_is(where: str) -> None:
    given = {name: torch.empty((3,), device="meta") for name in ("condition", "first", "second")}
    given[where] = torch.tensor(1.0, dtype=torch.float64)
    found = ARITHMETIC[Op.WHERE](given["condition"], given["first"], given["second"])
    assert found.device == torch.device("meta")
    assert found.shape == (3,)


def positive(dtype: str) -> np.ndarray[Any, Any]:
    x = np.random.default_rng(0).normal(size=(3, 4, 4)).astype(dtype)
    found: np.ndarray[Any, Any] = x @ np.swapaxes(x, 1, 2) + np.eye(4, dtype=dtype)
    return found


NUMBERS: list[Any] = [1e-3, np.array(1e-3), np.array([1e-3, 0.1, 2.0]).reshape(3, 1, 1)]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("eps", NUMBERS, ids=["known", "one", "each"])
@pytest.mark.parametrize("order", [2.0, np.array(4.0), np.array([2.0, 3.0, 4.0]).reshape(3, 1, 1)])
def test_inverse_roots_take_numbers_in_float64_beside_matrices_of_any_dtype(dtype: str, eps: Any, order: Any) -> None:
    x = positive(dtype)
    wanted = NUMPY_MATRIX[Op.INVERSE_ROOT](x, order, eps)
    numbers = [torch.from_numpy(n.copy()) if isinstance(n, np.ndarray) else n for n in (order, eps)]
    found = DEVICE_MATRIX[Op.INVERSE_ROOT](torch.from_numpy(x), *numbers).numpy()
    assert found.dtype == x.dtype
    np.testing.assert_allclose(found, wanted, rtol=1e-4 if dtype == "float32" else 1e-10, atol=1e-6)


MATRICES = [(1, 1, 1), (2, 5, 3), (2, 3, 5), (3, 4, 4), (0, 3, 3), (2, 0, 3), (2, 3, 0)]


@pytest.mark.parametrize("shape", MATRICES, ids=str)
@pytest.mark.parametrize("broken", [None, np.nan, np.inf, 0.0])
def test_matrix_functions_are_the_language_s(shape: tuple[int, ...], broken: float | None) -> None:
    x = np.random.default_rng(1).normal(size=shape)
    if broken is not None and x.size:
        x[0] *= broken
    calls: list[tuple[Op, tuple[Any, ...], dict[str, Any]]] = [
        (Op.NEWTON_SCHULZ, (x, 5), {"dtype": "float64"}),
        (Op.MATMUL, (x, np.swapaxes(x, 1, 2)), {}),
        (Op.TRANSPOSE, (x,), {}),
    ]
    if shape[1] >= shape[2]:
        calls.append((Op.QR, (x,), {}))
    if min(shape[1:]) and broken != 0:
        calls.append((Op.SINGULAR_VECTORS, (x, 1), {}))
    for op, given, keywords in calls:
        with np.errstate(all="ignore"):
            wanted = NUMPY_MATRIX[op](*given, **keywords)
        tensors = [torch.from_numpy(np.array(a)) if isinstance(a, np.ndarray) else a for a in given]
        found = DEVICE_MATRIX[op](*tensors, **keywords).numpy()
        assert found.shape == wanted.shape
        np.testing.assert_allclose(found, wanted, rtol=1e-8, atol=1e-8)
