"""Models of Flax NNX and of Equinox, trained by our transformations and beside optax's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import rulec
import rulec.jax

STEPS = 20
IMAGES = np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32)
TARGETS = np.sin(IMAGES @ np.linspace(-1, 1, 8, dtype=np.float32))[:, None]

SCHEDULE = optax.linear_schedule(0.03, 0, 40)

#: Ours and optax's.
PAIRS: dict[str, tuple[Callable[[], optax.GradientTransformation], Callable[[], optax.GradientTransformation]]] = {
    "adamw": (
        lambda: rulec.jax.transform("adamw", lr=0.03, weight_decay=0.1),
        lambda: optax.adamw(0.03, weight_decay=0.1),
    ),
    "clipped": (
        lambda: optax.chain(optax.clip_by_global_norm(0.5), rulec.jax.transform("adam", lr=SCHEDULE)),
        lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.adam(SCHEDULE)),
    ),
}


class Net(nnx.Module):
    """Two layers, and between them a norm that keeps averages."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(8, 16, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.last = nnx.Linear(16, 1, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.last(nnx.tanh(self.norm(self.first(x))))


@nnx.jit
def nnx_step(model: Net, optimizer: nnx.Optimizer[Net]) -> Any:
    """One step of the model's parameters; the averages of its norm are not the optimizer's."""
    loss, grads = nnx.value_and_grad(lambda m: jnp.mean((m(IMAGES) - TARGETS) ** 2))(model)
    optimizer.update(model, grads)
    return loss


def nnx_run(transformation: optax.GradientTransformation) -> tuple[list[float], Any]:
    model = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, transformation, wrt=nnx.Param)
    losses = [float(nnx_step(model, optimizer)) for _ in range(STEPS)]
    assert optimizer.step.get_value() == STEPS
    return losses, jax.tree.leaves(nnx.to_pure_dict(nnx.state(model, nnx.Param)))


class Layers(eqx.Module):
    """A network that holds what is no array: a function, a number, and an array of whole numbers."""

    first: eqx.nn.Linear
    last: eqx.nn.Linear
    order: jax.Array
    activation: Any = jax.nn.tanh
    scale: float = 1.0

    def __call__(self, x: Any) -> Any:
        return self.last(self.activation(self.first(x[self.order]))) * self.scale


def eqx_model() -> Layers:
    one, two = jax.random.split(jax.random.key(0))
    return Layers(eqx.nn.Linear(8, 16, key=one), eqx.nn.Linear(16, 1, key=two), jnp.arange(8)[::-1])


def eqx_loss(model: Layers) -> Any:
    return jnp.mean((jax.vmap(model)(IMAGES) - TARGETS) ** 2)


def eqx_run(transformation: optax.GradientTransformation) -> tuple[list[float], Any]:
    @eqx.filter_jit
    def step(model: Layers, state: Any) -> Any:
        loss, grads = eqx.filter_value_and_grad(eqx_loss)(model)
        updates, state = transformation.update(grads, state, eqx.filter(model, eqx.is_inexact_array))
        return eqx.apply_updates(model, updates), state, loss

    model = eqx_model()
    state = transformation.init(eqx.filter(model, eqx.is_inexact_array))
    losses = []
    for _ in range(STEPS):
        model, state, loss = step(model, state)
        losses.append(float(loss))
    return losses, jax.tree.leaves(eqx.filter(model, eqx.is_inexact_array))


@pytest.mark.parametrize(
    ("name", "run"),
    [
        pytest.param("clipped", nnx_run, marks=pytest.mark.slow),
        pytest.param("adamw", eqx_run, marks=pytest.mark.slow),
    ],
)
def test_trains_as_with_optax(name: str, run: Any) -> None:
    ours, theirs = (make() for make in PAIRS[name])
    (our_losses, our_params), (their_losses, their_params) = run(ours), run(theirs)
    assert our_losses[-1] < 0.8 * our_losses[0]
    np.testing.assert_allclose(our_losses, their_losses, rtol=1e-4)
    for a, b in zip(our_params, their_params, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_paths_of_nnx_are_those_of_the_model() -> None:
    """For patterns as for tags, and before the first step, when arrays are still in variables, as after it."""
    rules = rulec.partition({"norm/*": None, "**/kernel": "muon", "**/bias": rulec.part("momentum", lr=0.1)})
    model = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, rulec.jax.transform(rules, tags={"last/kernel": {"head"}}), wrt=nnx.Param)
    before = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    nnx_step(model, optimizer)
    after = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    second = nnx.to_pure_dict(nnx.state(optimizer))["opt_state"]["v"]
    assert second["first"]["kernel"] is None
    assert second["last"]["kernel"].shape == (16, 1)
    np.testing.assert_array_equal(before["norm"]["scale"], after["norm"]["scale"])
    assert (before["last"]["bias"] != after["last"]["bias"]).all()


def test_equinox_model_by_the_donated_step() -> None:
    """Partitioned: a step takes arrays alone."""
    arrays, rest = eqx.partition(eqx_model(), eqx.is_inexact_array)
    state = rulec.jax.init("adamw", arrays)
    start, before = eqx_loss(eqx.combine(arrays, rest)), arrays.first.weight
    grad = jax.jit(jax.grad(lambda a: eqx_loss(eqx.combine(a, rest))))
    for _ in range(STEPS):
        arrays, state = rulec.jax.step("adamw", arrays, grad(arrays), state, lr=0.01)
    assert eqx_loss(eqx.combine(arrays, rest)) < 0.7 * start
    assert before.is_deleted()
    assert state.m.first.weight.shape == (16, 8)
