"""Tasks in torch and JAX: the same race as by hand in NumPy, and mistakes in them."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import rulec
from rulec.errors import RulecError
from rulec.tools.race.task import stacked
from rulec.tools.race.tasks.user import UserTask

RNG = np.random.default_rng(0)
INPUTS = RNG.normal(size=(40, 3)).astype(np.float32)
TARGETS = np.tanh(INPUTS @ np.array([1.0, -2.0, 0.5], np.float32))[:, None]


def rows_at(step: int) -> Any:
    return slice(8 * (step % 5), 8 * (step % 5) + 8)


def in_torch(seed: int) -> Any:
    model = torch.nn.Linear(3, 1)
    with torch.no_grad():
        model.weight.fill_(0.1 * (seed + 1))
        model.bias.zero_()
    inputs, targets = torch.from_numpy(INPUTS), torch.from_numpy(TARGETS)

    def loss(model: Any, step: int, seed: int) -> Any:
        rows = rows_at(step)
        return torch.nn.functional.mse_loss(model(inputs[rows]), targets[rows])

    return model, loss, lambda model: torch.nn.functional.mse_loss(model(inputs), targets)


def in_jax(seed: int) -> Any:
    params = {"layer": {"weight": jnp.full((1, 3), 0.1 * (seed + 1)), "bias": jnp.zeros(1)}}

    def loss(params: Any, step: Any, seed: Any) -> Any:
        rows = 8 * (step % 5) + jnp.arange(8)
        return error(params, jnp.asarray(INPUTS)[rows], jnp.asarray(TARGETS)[rows])

    def error(params: Any, inputs: Any, targets: Any) -> Any:
        return jnp.mean((inputs @ params["layer"]["weight"].T + params["layer"]["bias"] - targets) ** 2)

    return params, loss, lambda params: error(params, INPUTS, TARGETS)


def by_hand(seed: int, lr: float, steps: int) -> tuple[list[float], float]:
    """The losses of gradient descent in float64, and the held-out figure in the end."""
    w, b, losses = np.full(3, 0.1 * (seed + 1)), 0.0, []
    for step in range(steps):
        x, y = INPUTS[rows_at(step)].astype(float), TARGETS[rows_at(step), 0]
        error = x @ w + b - y
        losses.append(np.mean(error**2))
        w, b = w - lr * 2 * x.T @ error / 8, b - lr * 2 * error.mean()
    return losses, float(np.mean((INPUTS @ w + b - TARGETS[:, 0]) ** 2))


@pytest.mark.parametrize("fit", [in_torch, in_jax])
def test_a_race_is_gradient_descent_by_hand(fit: Any) -> None:
    result = rulec.race(["sgd"], fit, lr=(0.05, 0.1), rates=2, seeds=2, steps=12)
    (sgd,) = result.outcomes
    for place in np.ndindex(2, 2):
        losses, last = by_hand(place[1], (0.05, 0.1)[place[0]], 12)
        np.testing.assert_allclose(sgd.losses[(slice(None), *place)], losses, rtol=1e-5)
        assert sgd.measures["held out"][place] == pytest.approx(last, rel=1e-5)


def test_names_are_those_of_the_model() -> None:
    assert UserTask(in_torch, "t").initial(0).keys() == {"weight", "bias"}
    assert UserTask(in_jax, "t").initial(0).keys() == {"layer/weight", "layer/bias"}


def test_random_numbers_of_torch_follow_from_seed_and_step() -> None:
    def noisy(seed: int) -> Any:
        model = torch.nn.Linear(3, 1)  # other weights at every call
        return model, lambda model, step, seed: model(torch.randn(4, 3)).square().mean()

    task = UserTask(noisy, "noisy")
    params = stacked(task, 1, (0, 1))
    np.testing.assert_array_equal(params["weight"], stacked(task, 1, (0, 1))["weight"])
    state = torch.get_rng_state()
    losses = [task.gradients(params, step, (0, 1))[0] for step in (0, 1, 0)]
    np.testing.assert_array_equal(losses[0], losses[2])
    assert losses[0][0, 0] != losses[1][0, 0]
    assert torch.equal(state, torch.get_rng_state())


def normed() -> Any:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    return model, lambda model, step, seed: model(torch.from_numpy(INPUTS)).square().sum()


def halves() -> Any:
    return torch.nn.Linear(3, 1).bfloat16(), lambda model, step, seed: None


def apart() -> Any:
    return torch.nn.Linear(3, 1), lambda model, step, seed: torch.zeros(())


def drawn() -> Any:
    def loss(params: Any, step: Any, seed: Any) -> Any:
        return params["w"] @ np.random.default_rng((seed, step)).normal(size=3)

    return {"w": jnp.ones(3)}, loss


def whole() -> Any:
    return {"w": jnp.ones(3, jnp.int32)}, lambda params, step, seed: 0.0


@pytest.mark.parametrize(
    ("fit", "sentence"),
    [
        (normed, "the buffer 1.running_mean of the model of t changes with each loss"),
        (halves, "the parameter weight of the task t must be in float32 or float64 on the processor, not in bfloat16"),
        (apart, "the loss of t must return a tensor of one number that depends on the model's parameters"),
        (drawn, "the loss of t is compiled by jax.jit, where step and seed are traced numbers"),
        (whole, "the parameter w of the task t must be a NumPy array in float32 or float64, not an array of int32"),
    ],
)
def test_a_mistake_is_one_sentence(fit: Any, sentence: str) -> None:
    task = UserTask(fit, "t")
    with pytest.raises(RulecError) as raised:
        task.gradients(stacked(task, 1, (0,)), 0, (0,))
    assert str(raised.value).startswith(sentence)
    assert "\n" not in str(raised.value)


def test_jax_is_compiled_once() -> None:
    calls = []

    def counted(seed: int) -> Any:
        params, loss, _ = in_jax(seed)
        return params, lambda *args: (calls.append(1), loss(*args))[1]

    task = UserTask(counted, "t")
    for step in range(4):
        task.gradients(stacked(task, 3, (0,)), step, (0,))
    assert len(calls) == 1
