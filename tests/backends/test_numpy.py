"""The numpy backend: its whole contract, the code it prints, and arrays of other libraries."""

from __future__ import annotations

import inspect
import traceback
from typing import Any

import numpy as np
import pytest

import rulec
from rulec.backend.protocol import Rows
from rulec.compiler.layout import layout_for
from rulec.compiler.pipeline import compile
from rulec.compiler.view import matrix_view
from rulec.errors import BackendUnsupported, InternalError, TensorError
from rulec.testing import IEEE, NumpyKind
from rulec.testing.cases import MATRIX_SHAPES, loaded
from rulec.testing.conformance import check_maximize, check_mixed_dtypes, check_operations, check_rule
from rulec.testing.trial import Subject
from rulec.testing.whole import check_whole
from rulec_backends.numpy import NumpyBackend, NumpyKernel
from tests.backends import strict_arrays
from tests.backends.kinds import AWKWARD, CUTS, KINDS, check_extremes, check_piece, pieces, rule_of

SUBJECT = Subject(NumpyBackend(), NumpyKind(), IEEE)

ADAMW = '''\
"""AdamW by the numpy backend: p:f32 g:f32 m:f32 v:f32. Printed by rulec."""


def step(
    xp, real, p, g, m, v, beta1, one_minus_beta1, beta2, one_minus_beta2, one_minus_beta1_t, sqrt_one_minus_beta2_t,
    eps, weight_decay, lr,
):
    """Update one tensor in place. Arrays are of one shape, scalars 0-d; computed in float32.

    `xp` is the arrays' namespace, `real` makes float32 of a number or an array.
    """
    m_new = beta1 * m + one_minus_beta1 * g
    v_new = beta2 * v + one_minus_beta2 * g * g
    m_hat = m_new / one_minus_beta1_t
    sigma = xp.sqrt(v_new) / sqrt_one_minus_beta2_t
    adam_direction = m_hat / (sigma + eps)
    decay_direction = weight_decay * p
    direction = adam_direction + decay_direction
    p_new = p - lr * direction
    m[...] = m_new
    v[...] = v_new
    p[...] = p_new
'''


def kernel_of(rule: rulec.Rule, dtype: str = "float32") -> tuple[NumpyKernel, Any]:
    program = compile(rule)
    layout = layout_for(program, dtype)
    backend = NumpyBackend()
    return backend.build(program, layout, backend.emit(program, layout)), program


def one_row(program: Any, value: float = 0.5) -> Rows:
    return Rows(np.full((1, len(program.scalars.columns)), value), np.zeros(1, np.int64))


@pytest.mark.parametrize("name", [*KINDS, *AWKWARD])
def test_rules_of_every_kind(name: str) -> None:
    check_rule(SUBJECT, rule_of(name), "float32")


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "float16"])
@pytest.mark.parametrize("name", CUTS)
def test_other_dtypes(name: str, dtype: str) -> None:
    check_rule(SUBJECT, loaded(name), dtype, MATRIX_SHAPES[5:])


def test_mixed_dtypes_and_ascent() -> None:
    check_mixed_dtypes(SUBJECT, loaded("came"), ["float32", "bfloat16", "float64"])
    check_maximize(SUBJECT, loaded("lamb"), "float16")


def test_every_operation() -> None:
    check_operations(SUBJECT, "float32")


def test_extremes_of_numbers_of_one_sign() -> None:
    check_extremes(SUBJECT)


@pytest.mark.parametrize("piece", pieces(*NumpyKind().dtypes))
def test_the_contract(piece: str) -> None:
    check_piece(SUBJECT, piece, *NumpyKind().dtypes)


@pytest.mark.another
@pytest.mark.parametrize("name", rulec.rules())
def test_every_rule(name: str) -> None:
    for dtype in NumpyKind().dtypes:
        check_rule(SUBJECT, loaded(name), dtype)
    check_whole(SUBJECT, loaded(name))


def test_all_dtypes_of_numpy_are_tested() -> None:
    assert [*NumpyKind().dtypes] == ["float32", "float64", "bfloat16", "float16"]


def test_the_code_reads_like_the_rule() -> None:
    program = compile(rulec.load("adamw"))
    assert NumpyBackend().emit(program, layout_for(program, "float32")) == ADAMW


def test_storage_is_converted_where_it_is_read_and_written() -> None:
    program = compile(rulec.load("lion"))
    source = NumpyBackend().emit(program, layout_for(program, "bfloat16", "float32", maximize=True))
    body = [line.strip() for line in source.splitlines()]
    assert "g = -g_stored" in body
    assert "m = real(m_stored)" in body
    assert "m_stored[...] = xp.asarray(m_new, dtype=m_stored.dtype)" in body


def test_a_value_that_is_stored_elsewhere_is_copied_before_it_is_overwritten() -> None:
    rule = rulec.parse("name: Swap\nstate: {a: 1, b: 2}\nstep: |\n  c = a\n  a = b\n  b = c\n  p = p - g\n")
    kernel, program = kernel_of(rule)
    p, a, b = np.zeros(3, np.float32), np.ones(3, np.float32), np.full(3, 2, np.float32)
    kernel.bind([p], [{"a": a, "b": b}])(0, [np.ones(3, np.float32)], one_row(program))
    assert (a.tolist(), b.tolist()) == ([2.0] * 3, [1.0] * 3)


def test_arrays_are_updated_where_they_lie() -> None:
    kernel, program = kernel_of(rulec.load("momentum"))
    memory = np.ones(10, np.float32)
    p, m = memory[1:4], np.asfortranarray(np.zeros((1, 3), np.float32))[0]
    params, states = [p], [{"m": m}]
    written = kernel.bind(params, states)(0, [np.ones(3, np.float32)], one_row(program))
    assert written == (params, states, {})
    assert memory[1:4].tolist() != [1.0] * 3
    assert memory[4:].tolist() == [1.0] * 6


def test_a_traceback_shows_the_printed_line() -> None:
    kernel, program = kernel_of(rulec.load("sgd"))
    call = kernel.bind([np.zeros(3, np.float32)], [{}])
    with pytest.raises(ValueError, match="broadcast") as caught:
        call(0, [np.zeros(4, np.float32)], one_row(program))
    last = traceback.extract_tb(caught.value.__traceback__)[-1]
    assert last.line == "p_new = p - lr * g"
    assert inspect.getsource(kernel.steps[0]).startswith("def step(xp, real, p, g, lr):")


def test_equal_sources_are_one_function() -> None:
    assert kernel_of(rulec.load("sgd"))[0].steps[0] is kernel_of(rulec.load("sgd"))[0].steps[0]


def test_it_needs_no_warnings_switched_off() -> None:
    kernel, program = kernel_of(rulec.parse("name: Logs\nstep: |\n  p = log(g)/g\n"))
    p = np.zeros(1, np.float32)
    with np.errstate(all="raise"):
        kernel.bind([p], [{}])(0, [np.zeros(1, np.float32)], one_row(program))
    assert p[0] == -np.inf


# Stages

FACTORED = """\
name: Factored
view: {short: first}
hyper: {lr: 0.1}
state: {low: {init: 0, per: tensor}}
step: |
  r = sum(g**2, per="row")
  c = max(g, per="col")
  low = min(p) + 0.5*low
  direction = where(r > c, g/r, p)*low
"""

FACTORED_SOURCE = '''\
"""Factored by the numpy backend: p:f32 g:f32. Printed by rulec."""

from rulec_backends.numpy.words import greatest
from rulec_backends.numpy.words import least


def stage_0(xp, real, p, g):
    """Stage 0 of 2 for one tensor. Arrays are (batch, rows, cols) or less, scalars 0-d; computed in float32.

    `xp` is the arrays' namespace, `real` makes float32 of a number or an array.
    """
    min_p = least(p)
    r = xp.sum(g * g, axis=2, keepdims=True, dtype=xp.float64)
    c = greatest(g, axis=1)
    return {"min_p": min_p, "r": r, "c": c}


def stage_1(xp, real, p, g, r_2, c_2, lr, low_new):
    """Stage 1 of 2 for one tensor. Arrays are (batch, rows, cols) or less, scalars 0-d; computed in float32.

    `xp` is the arrays' namespace, `real` makes float32 of a number or an array.
    """
    direction = xp.where(r_2 > c_2, g / r_2, p) * low_new
    p_new = p - lr * direction
    p[...] = p_new
'''


def test_every_stage_is_a_function_that_reads_like_the_rule() -> None:
    program = compile(rulec.parse(FACTORED))
    assert NumpyBackend().emit(program, layout_for(program, "float32")) == FACTORED_SOURCE


def test_a_stage_sees_the_matrices_that_the_rule_sees() -> None:
    kernel, program = kernel_of(rulec.parse(FACTORED))
    p, g = np.ones((3, 2), np.float32), np.arange(6, dtype=np.float32).reshape(3, 2)
    views = [matrix_view((3, 2), {"short": "first"})]
    rows = Rows(np.full((1, len(program.columns)), 0.5), np.zeros(1, np.int64))
    call = kernel.bind([p], [{}], views)
    reduced = call(0, [g], rows).reduced
    assert reduced["r"][0].tolist() == [[[20.0], [35.0]]]
    assert reduced["c"][0].tolist() == [[[1.0, 3.0, 5.0]]]
    assert (reduced["min_p"].tolist(), p.tolist()) == ([1.0], [[1.0, 1.0]] * 3)
    vectors = {"r_2": [np.array([4, 0.5], np.float32)], "c_2": [np.array([1, 2, 3], np.float32)]}
    call(1, [g], rows, vectors)
    # Rows of the matrices are columns in memory. In the first, where r > c: 1 - lr*low*g/r; elsewhere p*(1 - lr*low).
    assert p.tolist() == [[1.0, 0.75], [0.875, 0.75], [0.75, 0.75]]


def test_arrays_whose_matrices_are_no_view_are_refused() -> None:
    kernel, program = kernel_of(rulec.parse(FACTORED))
    rows = Rows(np.full((1, len(program.columns)), 0.5), np.zeros(1, np.int64))
    p = np.asfortranarray(np.ones((3, 2), np.float32))
    call = kernel.bind([p], [{}], [matrix_view((3, 2), {"short": "first"})])
    with pytest.raises(TensorError, match=r"an array of shape \(3, 2\) is not contiguous: pass np.ascontiguousarray"):
        call(0, [np.ones((3, 2), np.float32)], rows)
    with pytest.raises(InternalError, match="bound without their views"):
        kernel.bind([p], [{}])(0, [np.ones((3, 2), np.float32)], rows)


# Other libraries


class StrictKind(NumpyKind):
    """Arrays that have what the array API standard says, and nothing else."""

    name = "strict"
    dtypes = ("float32", "float64")

    def make(self, values: np.ndarray[Any, Any], skip: int = 0) -> Any:
        return strict_arrays.Array(super().make(values, skip))

    def read(self, array: Any) -> np.ndarray[Any, Any]:
        return array.values.copy()  # type: ignore[no-any-return]


STRICT = Subject(NumpyBackend(), StrictKind(), IEEE)


@pytest.fixture
def complete(monkeypatch: pytest.MonkeyPatch) -> None:
    """The two functions that the standard lacks."""
    monkeypatch.setattr(strict_arrays, "cbrt", strict_arrays.wrapped(np.cbrt), raising=False)
    monkeypatch.setattr(strict_arrays, "erf", strict_arrays.wrapped(strict_arrays.slow_erf), raising=False)


@pytest.mark.parametrize("name", [n for n in (*KINDS, *AWKWARD) if n != "madgrad"])
def test_the_code_runs_on_arrays_that_only_follow_the_standard(name: str) -> None:
    check_rule(STRICT, rule_of(name), "float32", MATRIX_SHAPES[2:6])


@pytest.mark.usefixtures("complete")
def test_operations_on_arrays_that_only_follow_the_standard() -> None:
    check_operations(STRICT, "float32")


@pytest.mark.usefixtures("complete")
@pytest.mark.parametrize("piece", pieces(*StrictKind().dtypes))
def test_the_contract_of_arrays_that_only_follow_the_standard(piece: str) -> None:
    check_piece(STRICT, piece, *StrictKind().dtypes)


def test_what_the_standard_lacks_is_an_error_that_says_so() -> None:
    kernel, program = kernel_of(rulec.load("madgrad"))
    arrays = {name: strict_arrays.Array(np.ones(2, np.float32)) for name in ("s", "v", "x0")}
    call = kernel.bind([strict_arrays.Array(np.ones(2, np.float32))], [arrays])
    with pytest.raises(TensorError, match=r"arrays of tests\.backends\.strict_arrays have no cbrt: use NumPy arrays"):
        call(0, [strict_arrays.Array(np.ones(2, np.float32))], one_row(program))


def test_arrays_that_cannot_be_written_are_refused() -> None:
    import jax.numpy as jnp

    kernel, _ = kernel_of(rulec.load("sgd"))
    with pytest.raises(BackendUnsupported, match="arrays of type ArrayImpl, which cannot be written"):
        kernel.bind([jnp.zeros(3)], [{}])
    with pytest.raises(BackendUnsupported, match="arrays of type list of rule 'SGD'"):
        kernel.bind([[0.0]], [{}])
