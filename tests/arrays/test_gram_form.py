"""`newton_schulz` by Gram matrices: on every library as exact as its polynomials say, and no less than Muon's own.

The oracle is the singular value decomposition in float64: the singular vectors stay, and the polynomials are of the
singular values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest
import torch

import rulec
import rulec.torch
from benchmarks.orthogonal import SCHEDULES, SPECTRA, apart, polynomials
from rulec.array_api import newton_schulz as iteration
from rulec.array_api.numpy import NUMPY_MATRIX
from rulec.compiler.reference import ReferenceOptimizer
from rulec.errors import HyperError, RuleError
from rulec.language.expr.newton_schulz import in_blocks, iterated_in, multiplications
from rulec.language.expr.node import Op
from rulec.torch.tensors import matrix
from rulec.torch.tensors.library import DEVICE_MATRIX
from rulec.torch.tensors.matrix import TORCH_MATRIX

Array = np.ndarray[Any, Any]


def _host(x: Array, **keywords: Any) -> Array:
    result: Array = TORCH_MATRIX[Op.NEWTON_SCHULZ](x[None], 5.0, **keywords)[0]
    return result


def _device(x: Array, **keywords: Any) -> Array:
    return np.asarray(DEVICE_MATRIX[Op.NEWTON_SCHULZ](torch.from_numpy(x)[None], 5.0, **keywords)[0])


def _jax(x: Array, **keywords: Any) -> Array:
    from rulec.jax.library import MATRIX

    with jax.enable_x64(True):
        return np.asarray(MATRIX[Op.NEWTON_SCHULZ](jax.numpy.asarray(x)[None], 5.0, **keywords)[0])


def _numpy(x: Array, **keywords: Any) -> Array:
    result: Array = NUMPY_MATRIX[Op.NEWTON_SCHULZ](x[None], 5.0, **keywords)[0]
    return result


LIBRARIES: Mapping[str, Callable[..., Array]] = {"host": _host, "device": _device, "jax": _jax, "numpy": _numpy}


def drawn(shape: tuple[int, int], spectrum: str, condition: float) -> Array:
    """A matrix with these singular values, in float32."""
    random = np.random.default_rng(sum(shape))
    left, right = (np.linalg.qr(random.standard_normal((n, min(shape))))[0] for n in shape)
    values = SPECTRA[spectrum](min(shape), condition)
    return ((left * values) @ right.T).astype(np.float32)


@pytest.mark.parametrize("shape", [(24, 72), (60, 20), (32, 32)])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16", None])
@pytest.mark.parametrize("library", LIBRARIES)
def test_every_library_has_the_polynomials_of_the_singular_values(
    library: str, dtype: str | None, shape: tuple[int, int]
) -> None:
    """To a few roundings of the operand, of its norm and of the iteration, where the library rounds."""
    x = drawn(shape, "geometric", 10.0)
    result = LIBRARIES[library](x, dtype=dtype, form="gram")
    most = {"float64": 2.0**-21, "float16": 2.0**-8, "bfloat16": 2.0**-5}.get(str(dtype), 2.0**-18)
    assert result.dtype == np.float32
    assert apart(result, polynomials(x, "muon"))[0] < most


@pytest.mark.parametrize("spectrum", SPECTRA)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("library", ["host", "device"])
def test_it_is_no_less_exact_than_muons_own_in_bfloat16(library: str, schedule: str, spectrum: str) -> None:
    """In the Frobenius norm and in the spectral one, for conditions from one to a million."""
    function = LIBRARIES[library]
    for condition in (1.0, 1e2, 1e6):
        x = drawn((32, 96), spectrum, condition)
        exact = polynomials(x, schedule)
        ours, muons = (
            apart(function(x, dtype="bfloat16", coefficients=schedule, form=form), exact) for form in ("gram", "direct")
        )
        assert ours[0] <= muons[0], condition
        assert ours[1] <= muons[1], condition


#: Iterations between restarts -> a schedule and a condition of which they are less exact than Muon's own.
FAULTS: Mapping[tuple[int, ...], tuple[str, float]] = {
    (3, 2): ("muon", 10.0), (4, 1): ("polar_express", 1e2), (5,): ("polar_express", 1e2),
}  # fmt: skip


@pytest.mark.parametrize("sizes", FAULTS, ids=str)
def test_a_restart_left_out_is_seen(sizes: tuple[int, ...]) -> None:
    schedule, condition = FAULTS[sizes]
    x = drawn((96, 128), "four large", condition)
    exact = polynomials(x, schedule)

    def blocks(rows: Any, *_: Any) -> Any:
        ends = np.cumsum([0, *sizes])
        return tuple(rows[a:b] for a, b in pairwise(ends))

    def far(form: str) -> float:
        return apart(_host(x, dtype="bfloat16", coefficients=schedule, form=form), exact)[1]

    with mock.patch.object(matrix, "in_blocks", blocks):
        broken = far("gram")
    assert far("gram") <= far("direct") < broken


def test_bfloat16_inside_is_seen() -> None:
    x = drawn((96, 384), "uniform", 1e2)
    exact = polynomials(x, "muon")
    with mock.patch.object(matrix, "iterated_in", lambda dtype, form: dtype):
        broken = apart(_host(x, dtype="bfloat16", form="gram"), exact)[0]
    muons = apart(_host(x, dtype="bfloat16", form="direct"), exact)[0]
    assert apart(_host(x, dtype="bfloat16", form="gram"), exact)[0] <= muons < broken


def test_gradients_of_any_size_are_iterated_in_float16() -> None:
    """They are divided by their norm before they are rounded, and by the norm in float32."""
    x = drawn((20, 60), "uniform", 10.0)
    for size in (1e-6, 1.0, 1e12):
        scaled = (x * np.float32(size)).astype(np.float32)
        for function in (_host, _device, _jax):
            assert apart(function(scaled, dtype="bfloat16", form="gram"), polynomials(scaled, "muon"))[0] < 2.0**-5


def test_nan_and_infinity_stay_in_their_matrix() -> None:
    x = np.stack([drawn((20, 60), "uniform", 10.0)] * 3)
    x[1, 2, 3], x[2, 0, 0] = np.nan, np.inf
    for table in (TORCH_MATRIX, NUMPY_MATRIX):
        with np.errstate(all="ignore"):
            result = table[Op.NEWTON_SCHULZ](x, 5.0, dtype="bfloat16", form="gram")
        assert np.isfinite(result[0]).all()
        assert np.isnan(result[1:]).all()


def test_blocks_of_two_iterations() -> None:
    rows: Any = tuple((float(k), 0.0, 0.0) for k in range(5))
    assert [len(block) for block in in_blocks(rows, "gram", 2, 3)] == [2, 2, 1]
    assert sum(in_blocks(rows, "gram", 2, 3), ()) == rows
    assert [len(block) for block in in_blocks(rows, "gram", 3, 3)] == [1] * 5
    assert [len(block) for block in in_blocks(rows, "direct", 2, 3)] == [1] * 5
    assert in_blocks((), "gram", 2, 3) == ()
    assert [iterated_in(d, "gram") for d in ("bfloat16", "float16", "float32", None)] == [
        "float16", "float16", "float32", None
    ]  # fmt: skip
    assert iterated_in("bfloat16", "direct") == "bfloat16"


@pytest.mark.parametrize("shape", [(8, 8), (8, 16), (64, 8)])
@pytest.mark.parametrize("form", ["direct", "gram"])
def test_multiplications_are_those_of_the_products(form: str, shape: tuple[int, int]) -> None:
    """Counted in NumPy's products, of which the Gram form never has more."""
    counted = [0.0]
    matmul = np.matmul

    def noted(a: Array, b: Array) -> Array:
        counted[0] += a.shape[-2] * a.shape[-1] * b.shape[-1]
        return matmul(a, b)

    with mock.patch.object(iteration.Functions, "matmul", lambda self, a, b: noted(a, b)):
        _numpy(drawn(shape, "uniform", 2.0), form=form)
    assert counted[0] == multiplications(*shape, 5, form)
    assert counted[0] <= multiplications(*shape, 5, "direct") or shape == (8, 16)


# Rules


def test_a_rule_in_another_form() -> None:
    rule = rulec.load("muon").in_form("gram")
    assert 'newton_schulz((1 - momentum)*g + momentum*m, steps=ns_steps, dtype="bfloat16", form="gram")' in (
        rule.step_text()
    )
    assert rulec.parse(rule.to_yaml()).step_text() == rule.step_text()
    assert rule.in_form("direct").step_text() == rulec.load("muon").step_text()
    with pytest.raises(RuleError, match=r"^form of newton_schulz is one of 'direct', 'gram', not 'small'$"):
        rule.in_form("small")
    with pytest.raises(RuleError, match=r"^AdamW has no newton_schulz, which alone has forms$"):
        rulec.load("adamw").in_form("gram")


def test_the_reference_has_the_same_numbers_in_both_forms() -> None:
    """In float64 they differ by roundings alone."""
    grads, ends = np.random.default_rng(0).normal(size=(3, 8, 24)), []
    for rule in (rulec.load("muon"), rulec.load("muon").in_form("gram")):
        reference = ReferenceOptimizer(rule, [np.zeros((8, 24))])
        for grad in grads:
            reference.step([grad])
        ends.append(reference.params[0])
    assert 0 < np.abs(ends[0] - ends[1]).max() < 1e-12


@pytest.mark.parametrize("name", ["muon", "normuon", "spel"])
def test_classes_of_torch_take_the_form(name: str) -> None:
    def stepped(**keywords: Any) -> Array:
        param = torch.nn.Parameter(torch.from_numpy(drawn((16, 48), "uniform", 10.0)))
        param.grad = torch.from_numpy(drawn((48, 16), "uniform", 5.0).T.copy())
        kind = rulec.torch.Muon if name == "muon" else rulec.torch.optimizer(name)
        optimizer = kind([param], lr=0.1, **keywords)
        optimizer.step()
        assert optimizer.param_groups[0].get("ns_form") == keywords.get("ns_form")
        return param.detach().numpy()

    direct, gram = stepped(), stepped(ns_form="gram")
    assert 0 < np.abs(direct - gram).max() < 0.1 * 2.0**-4
    with pytest.raises(HyperError, match=r"ns_form='small': ns_form is None or 'gram'$"):
        stepped(ns_form="small")
