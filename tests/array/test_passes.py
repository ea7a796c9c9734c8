"""Rules with several gradients in a step, on arrays."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import rulec
from rulec.compiler.reference import ReferenceOptimizer
from rulec.errors import RulecError, RuleError
from rulec.standalone.prose import written
from tests.language.test_passes import EVERY_OTHER, THREE

SHAPES = ((3, 4), (5,))


def gradient(params: Any) -> list[Any]:
    """The gradients of the sum of sines."""
    return [np.cos(p) for p in params]


def start(dtype: Any = "float64") -> list[Any]:
    return [np.asarray(np.random.default_rng(0).normal(size=shape), dtype=dtype) for shape in SHAPES]


@pytest.mark.parametrize("backend", ["cpu", "numpy", "c"])
@pytest.mark.parametrize("maximize", [False, True])
def test_every_backend_does_what_the_reference_does(backend: str, maximize: bool) -> None:
    for rule in (rulec.parse(THREE), rulec.parse(EVERY_OTHER), rulec.load("looksam(adamw, k=2)")):
        params = start()
        optimizer = rulec.array.Optimizer(rule, params, backend, maximize=maximize)
        reference = ReferenceOptimizer(rule, params)
        sign = -1 if maximize else 1
        for _ in range(4):
            reference.step(gradient(reference.params), gradient=gradient)
            grads = [sign * g for g in gradient(params)]
            optimizer.step(grads, gradient=lambda: [sign * g for g in gradient(params)])  # noqa: B023
        for ours, theirs in zip(params, reference.params, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-14)


def test_two_calls_are_one() -> None:
    one, two = start(), start()
    by_function, by_calls = (rulec.array.Optimizer("sam(adamw)", params) for params in (one, two))
    for _ in range(3):
        by_function.step(gradient(one), gradient=lambda: gradient(one))
        grads = gradient(two)
        while by_calls.next_pass(grads):
            grads = gradient(two)
        by_calls.step(grads)
    assert all(np.array_equal(a, b) for a, b in zip(one, two, strict=True))


def test_a_rule_without_passes_has_none() -> None:
    params = start()
    optimizer = rulec.array.Optimizer("adam", params)
    assert not optimizer.next_pass(gradient(params))
    optimizer.step(gradient(params), gradient=lambda: pytest.fail("asked for a second gradient"))


@pytest.mark.parametrize("weights", ["", "split", "kahan", "master"])
def test_an_exception_in_a_pass_puts_everything_back(weights: str) -> None:
    params = start(ml_dtypes.bfloat16 if weights else "float32")
    optimizer = rulec.array.Optimizer("sam(adamw)", params, weights=weights)

    def wide() -> list[Any]:
        return [np.cos(p.astype(np.float32)).astype(p.dtype) for p in params]

    optimizer.step(wide(), gradient=wide)
    before, kept = [p.copy() for p in params], optimizer.state_dict()["state"]
    moved = []

    def failing() -> Any:
        moved.append(any(not np.array_equal(a, b) for a, b in zip(params, before, strict=True)))
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        optimizer.step(wide(), gradient=failing)
    assert moved == [True]
    assert all(np.array_equal(a, b) for a, b in zip(params, before, strict=True))
    after = optimizer.state_dict()["state"]
    assert all(np.array_equal(after[n][k], kept[n][k]) for n in kept for k in kept[n])
    optimizer.step(wide(), gradient=wide)


def test_mistakes_have_one_sentence() -> None:
    params = start()
    optimizer = rulec.array.Optimizer("sam(adamw)", params)
    grads = gradient(params)
    with pytest.raises(RulecError, match="SAMAdamW evaluates the model again in a step: give step"):
        optimizer.step(grads)
    assert optimizer.next_pass(grads)
    for call in (optimizer.state_dict, lambda: optimizer.step(grads, gradient=lambda: grads)):
        with pytest.raises(RulecError, match="between the passes of a step: call put_back"):
            call()
    with pytest.raises(RulecError, match="a pass has gradients for other arrays than the first of its step"):
        optimizer.next_pass([grads[0], None])
    np.testing.assert_array_equal(params[1], start()[1])  # the error has put them back
    with pytest.raises(RuleError, match=r"partial\(\) has one gradient in a step, and SAMAdamW evaluates"):
        optimizer.partial().__enter__()
    with pytest.raises(RuleError, match="what rulec build writes has one gradient in a step"):
        written(rulec.load("sam(adamw)"), "c")
