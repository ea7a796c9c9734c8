"""L-BFGS with a line search on arrays, beside torch's iterates."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

import rulec.array
from rulec.errors import HyperError, RulecError, StateMismatch, TensorError

Array = np.ndarray[Any, Any]


def start(dtype: str = "float64") -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {"w": 0.5 * rng.normal(size=(2, 2)).astype(dtype), "more": [0.5 * rng.normal(size=3).astype(dtype)]}


def loss_of(tree: dict[str, Any]) -> tuple[Any, Any]:
    """Rosenbrock's function of all elements, and its gradients."""
    w, more = tree["w"], tree["more"][0]
    x = np.concatenate([w.reshape(-1), more]).astype("float64")
    bend = x[1:] - x[:-1] ** 2
    grad = np.zeros_like(x)
    grad[:-1] = -400 * bend * x[:-1] - 2 * (1 - x[:-1])
    grad[1:] += 200 * bend
    value = (100 * bend**2 + (1 - x[:-1]) ** 2).sum()
    return value, {"w": grad[:4].reshape(2, 2).astype(w.dtype), "more": [grad[4:].astype(more.dtype)]}


@pytest.mark.peer
@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_iterates_are_those_of_torch(search: str | None) -> None:
    keywords: dict[str, Any] = {"lr": 1.0 if search else 1e-3, "line_search_fn": search, "max_iter": 6}
    arrays = start()
    ours = rulec.array.LBFGS(arrays, **keywords)
    params = [torch.nn.Parameter(torch.tensor(x)) for x in (arrays["w"], arrays["more"][0])]
    theirs = torch.optim.LBFGS(params, **keywords)

    def closure() -> float:
        value, grads = loss_of({"w": params[0].detach().numpy(), "more": [params[1].detach().numpy()]})
        for param, grad in zip(params, (grads["w"], grads["more"][0]), strict=True):
            param.grad = torch.tensor(grad)
        return float(value)

    for _ in range(3):
        assert ours.step(lambda: loss_of(arrays)) == pytest.approx(float(theirs.step(closure)), rel=1e-12)
        for mine, other in zip((arrays["w"], arrays["more"][0]), params, strict=True):
            np.testing.assert_allclose(mine, other.detach().numpy(), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("search", ["strong_wolfe", "zoom", "backtracking"])
def test_other_dtypes_find_the_minimum(dtype: str, search: str) -> None:
    arrays = start(dtype)
    optimizer = rulec.array.LBFGS(arrays, line_search_fn=search, max_iter=60)
    for _ in range(3):
        optimizer.step(lambda: loss_of(arrays))
    assert arrays["w"].dtype == dtype
    np.testing.assert_allclose(arrays["w"], 1, atol=1e-3 if dtype == "float32" else 0.2)


def test_a_state_goes_on_with_the_same_bits() -> None:
    arrays = start()
    optimizer = rulec.array.LBFGS(arrays, line_search_fn="zoom", max_iter=3, history_size=2)
    optimizer.step(lambda: loss_of(arrays))
    saved, others = optimizer.state_dict(), copy.deepcopy(arrays)
    second = rulec.array.LBFGS(others)
    second.load_state_dict(saved)
    for _ in range(2):
        optimizer.step(lambda: loss_of(arrays))
        second.step(lambda: loss_of(others))
    np.testing.assert_array_equal(arrays["w"], others["w"])
    np.testing.assert_array_equal(arrays["more"][0], others["more"][0])
    fewer = rulec.array.LBFGS([np.ones(2)])
    with pytest.raises(
        StateMismatch, match="direction was saved with shape \\(7,\\), where the arrays have 2 elements"
    ):
        fewer.load_state_dict(saved)
    with pytest.raises(StateMismatch, match="not of LBFGS"):
        fewer.load_state_dict(rulec.array.Optimizer("adam", [np.ones(2)]).state_dict())


def test_mistakes_leave_the_arrays_as_they_were() -> None:
    arrays = start()
    before = copy.deepcopy(arrays)
    optimizer = rulec.array.LBFGS(arrays, line_search_fn="strong_wolfe")
    calls = []

    def failing() -> tuple[Any, Any]:
        calls.append(arrays["w"].copy())
        if len(calls) == 3:
            raise ZeroDivisionError
        return loss_of(arrays)

    with pytest.raises(ZeroDivisionError):
        optimizer.step(failing)
    assert not np.array_equal(calls[-1], before["w"])
    with pytest.raises(
        TensorError, match="the gradient of w has shape \\(4,\\): give a NumPy array of shape \\(2, 2\\)"
    ):
        optimizer.step(lambda: (1.0, {"w": np.ones(4)}))
    with pytest.raises(RulecError, match="must return the loss and the gradients, a pair"):
        optimizer.step(lambda: 1.0)  # type: ignore[arg-type, return-value]
    with pytest.raises(RulecError, match="give step\\(\\) a function of no arguments"):
        optimizer.step(None)  # type: ignore[arg-type]
    np.testing.assert_array_equal(arrays["w"], before["w"])
    with pytest.raises(HyperError, match="LBFGS has no keyword 'history'; did you mean 'history_size'"):
        rulec.array.LBFGS(arrays, history=3)
    optimizer.hyper["histry_size"] = 3
    with pytest.raises(HyperError, match="LBFGS has no keyword 'histry_size'; did you mean"):
        optimizer.step(lambda: loss_of(arrays))
    del optimizer.hyper["histry_size"]
    optimizer.hyper["history_size"] = 0
    with pytest.raises(HyperError, match="history_size=0: give a whole number"):
        optimizer.step(lambda: loss_of(arrays))
