"""Rules that order elements, on every backend and in every adapter, beside NumPy's stable sorts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import rulec
import rulec.jax
import rulec.torch
from rulec.array import Optimizer
from rulec.compiler.reference import ReferenceOptimizer
from rulec.errors import RuleError
from tests.backends.here import BACKENDS

Array = np.ndarray[Any, Any]

RULE = rulec.parse("""
name: Orders
hyper: {lr: 1.0}
state: {r: {init: 0, per: row}, best: {init: 0, per: tensor}}
step: |
  order = argsort(max(g, per="row"), per="matrix")
  r = take(max(g, per="row"), order, axis=0)
  best = take(g, numel - 1)
  direction = take(g, order, axis=0) + sort(p, per="row")*argsort(g, per="col") + take(sort(g), argsort(p))
""")

DRAWN = np.random.default_rng(7)


def drawn(shape: tuple[int, ...]) -> tuple[Array, Array]:
    """Parameters and gradients of few values: many are equal, and zeros have both signs."""
    numbers = DRAWN.integers(-3, 4, size=(2, *shape)).astype(np.float32)
    return numbers[0], np.where(numbers[1] == 0, np.float32(-0.0), numbers[1])


def by_numpy(p: Array, g: Array) -> dict[str, Array]:
    """The states and the parameter after a step."""
    matrices, grads = (x.reshape(-1, *(1,) * (2 - x.ndim), *x.shape[-2:]) for x in (p, g))
    matrices, grads = (x.reshape(-1, *x.shape[-2:]) for x in (matrices, grads))
    largest = grads.max(-1, keepdims=True)
    order = np.argsort(largest, axis=-2, kind="stable")
    columns = np.argsort(grads, axis=-2, kind="stable")
    flat = np.argsort(matrices.reshape(-1), kind="stable")
    direction = np.take_along_axis(grads, np.broadcast_to(order, grads.shape), -2)
    direction = direction + np.sort(matrices) * columns + np.sort(grads.reshape(-1))[flat].reshape(grads.shape)
    last = np.sort(grads.reshape(-1)[-1:])[0]
    return {"p": (matrices - direction).reshape(p.shape), "r": np.take_along_axis(largest, order, -2), "best": last}


def by_arrays(backend: str) -> Callable[[Array, Array], dict[str, Array]]:
    def run(p: Array, g: Array) -> dict[str, Array]:
        weights = {"w": p.copy()}
        optimizer = Optimizer(RULE, weights, backend)
        optimizer.step({"w": g})
        return {"p": weights["w"], **{key: np.asarray(optimizer.state("w")[key]) for key in ("r", "best")}}

    return run


def by_torch(p: Array, g: Array) -> dict[str, Array]:
    weight = torch.nn.Parameter(torch.from_numpy(p.copy()))
    weight.grad = torch.from_numpy(g.copy())
    optimizer = rulec.torch.optimizer(RULE)([weight])
    optimizer.step()
    state = optimizer.state[weight]
    return {"p": weight.detach().numpy(), **{key: np.asarray(state[key]) for key in ("r", "best")}}


def by_jax(p: Array, g: Array) -> dict[str, Array]:
    param = jnp.asarray(p)
    param, state = rulec.jax.step(RULE, param, jnp.asarray(g), rulec.jax.init(RULE, param))
    return {"p": np.asarray(param), "r": np.asarray(state.r), "best": np.asarray(state.best)}


def by_mlx(p: Array, g: Array) -> dict[str, Array]:
    mx = pytest.importorskip("mlx.core")
    import rulec.mlx

    optimizer = rulec.mlx.optimizer(RULE)()
    new = optimizer.apply_gradients({"w": mx.array(g)}, {"w": mx.array(p)})["w"]
    state = optimizer.state["w"]
    return {"p": np.array(new), "r": np.array(state["r"]), "best": np.array(state["best"])}


def by_fifty_digits(p: Array, g: Array) -> dict[str, Array]:
    reference = ReferenceOptimizer(RULE, [p.astype(float)], arithmetic="mpmath")
    reference.step([g.astype(float)])
    return {"p": reference.params[0].astype(float)}


RUNS: Mapping[str, Callable[[Array, Array], dict[str, Array]]] = {
    **{name: by_arrays(name) for name in ("numpy", "c", "cpu")}, "torch": by_torch, "jax": by_jax, "mlx": by_mlx,
    "fifty digits": by_fifty_digits,
}  # fmt: skip


@pytest.mark.parametrize("shape", [(5, 7), (2, 4, 3), (6,), (1, 1)], ids=str)
@pytest.mark.parametrize("run", [*BACKENDS, "torch", "jax", "mlx", "fifty digits"])
def test_a_step_is_that_of_stable_sorts(run: str, shape: tuple[int, ...]) -> None:
    p, g = drawn(shape)
    wanted = by_numpy(p, g)
    for key, found in RUNS[run](p, g).items():
        np.testing.assert_array_equal(np.asarray(found).reshape(-1), wanted[key].reshape(-1), err_msg=key)


def test_a_place_that_a_tensor_has_not_is_refused_before_a_step() -> None:
    rule = rulec.parse("name: R\nstep: |\n  direction = g*take(p, 4, axis=1)\n")
    Optimizer(rule, [np.zeros((2, 5))]).step([np.ones((2, 5))])
    with pytest.raises(RuleError, match=r"'take\(p, 4, axis=1\)' takes place 4 of 3 for a matrix of 2 by 3, and"):
        Optimizer(rule, [np.zeros((2, 3))]).step([np.ones((2, 3))])


def test_places_that_follow_from_values_are_nan_beyond_the_end() -> None:
    rule = rulec.parse("name: R\nhyper: {lr: 1.0}\nstep: |\n  direction = take(g, max(g))\n")
    weights = [np.zeros(3), np.zeros(3)]
    Optimizer(rule, weights).step([np.array([0.0, 2.0, 1.0]), np.array([0.0, 3.0, 1.0])])
    np.testing.assert_array_equal(weights, [[-1.0] * 3, [np.nan] * 3])
