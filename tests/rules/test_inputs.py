"""Rules that read the loss or the diagonal of the Hessian, in float64 beside optax and pytorch_optimizer."""

from __future__ import annotations

import re
from typing import Any

import jax
import numpy as np
import optax
import pytest
import torch

import rulec
import rulec.jax
import rulec.torch
from rulec.compiler.reference import ReferenceOptimizer
from tests.rules.inputs import INPUTS, InputPeer, inputs_of, loss_of
from tests.rules.passes import gradient_of, start

pytestmark = pytest.mark.peer


def test_every_rule_with_inputs_has_a_row() -> None:
    named = {re.split(r"[ (]", row.composed.removeprefix("transforms/"))[0] for row in INPUTS}
    assert {name.removeprefix("transforms/") for name in rulec.rules() if rulec.load(name).inputs} == named


@pytest.mark.each
@pytest.mark.parametrize("row", INPUTS, ids=lambda row: row.composed)
def test_agrees_with_its_peer(row: InputPeer) -> None:
    hyper, rule = row.hyper, rulec.load(row.composed)
    ours, theirs = ReferenceOptimizer(rule, start(), hyper), row.make()
    gradient = gradient_of()
    for _ in range(25):
        ours.step(gradient(ours.params), inputs=inputs_of(rule, ours.params))
        theirs.step()
        for a, b in zip(ours.params, theirs.params(), strict=True):
            assert float(np.max(np.abs(a - b)) / np.max(np.abs(b))) < 1e-12
    assert any(np.abs(a - b).max() > 0.05 for a, b in zip(ours.params, start(), strict=True))


@pytest.mark.parametrize("row", INPUTS, ids=lambda row: row.composed)
def test_torch_jax_and_arrays_take_the_inputs(row: InputPeer) -> None:
    hyper, rule, gradient = row.hyper, rulec.load(row.composed), gradient_of()
    reference, arrays = ReferenceOptimizer(rule, start(), hyper), start()
    tensors = [torch.nn.Parameter(torch.tensor(p)) for p in start()]
    on_arrays = rulec.array.Optimizer(rule, arrays, **hyper)
    betas = {"betas": (hyper["beta1"], hyper["beta2"])} if "beta2" in hyper else {}
    rest = {key: value for key, value in hyper.items() if not (betas and key in ("beta1", "beta2"))}
    in_torch = rulec.torch.optimizer(rule)(tensors, **rest, **betas)

    def closure() -> float:
        now = [t.detach().numpy() for t in tensors]
        for tensor, grad in zip(tensors, gradient(now), strict=True):
            tensor.grad = torch.tensor(grad)
        return loss_of(now)

    with jax.enable_x64(True):
        leaves = [jax.numpy.asarray(p) for p in start()]
        state = rulec.jax.init(rule, leaves, **hyper)
        for _ in range(3):
            reference.step(gradient(reference.params), inputs=inputs_of(rule, reference.params))
            on_arrays.step(gradient(arrays), **inputs_of(rule, arrays))
            inputs = inputs_of(rule, [t.detach().numpy() for t in tensors])
            read = {k: [x if x is None else torch.tensor(x) for x in v] for k, v in inputs.items() if k != "loss"}
            in_torch.step(closure, inputs=read)
            grads = gradient_of(jax.numpy)(leaves)
            leaves, state = rulec.jax.step(rule, leaves, grads, state, **inputs_of(rule, leaves), **hyper)
    for expected, *results in zip(reference.params, arrays, tensors, leaves, strict=True):
        for one in results:
            value = one.detach().numpy() if isinstance(one, torch.Tensor) else one
            np.testing.assert_allclose(value, expected, rtol=0, atol=1e-13)


def test_optax_s_sophia_steps_with_the_diagonal_of_the_step_before() -> None:
    """Its first step divides by none at all: with one element, all but the sign of the gradient is lost."""
    point, grad, diagonal = jax.numpy.ones(1), jax.numpy.full(1, 0.5), jax.numpy.full(1, 4.0)
    given = optax.GradientTransformation(lambda _: optax.EmptyState(), lambda _u, state, _p=None: (diagonal, state))
    theirs: Any = optax.contrib.sophia(
        0.1, b1=0.0, b2=0.0, weight_decay=0.0, gamma=1.0, update_interval=1, hessian_diagonal_fn=given
    )
    state, moves = theirs.init(point), []
    for _ in range(2):
        updates, state = theirs.update(grad, state, point)
        moves.append(float(updates[0]))
    ours = ReferenceOptimizer(
        rulec.load("sophia"), [np.ones(1)], {"lr": 0.1, "beta1": 0, "beta2": 0, "gamma": 1, "k": 1}
    )
    ours.step([np.full(1, 0.5)], inputs={"hessian": [np.full(1, 4.0)]})
    np.testing.assert_allclose(moves, [-0.1, -0.1 * 0.5 / 4], rtol=1e-6)
    np.testing.assert_allclose(ours.params[0] - 1, -0.1 * 0.5 / 4, rtol=1e-12)


def test_optax_s_polyak_step_has_the_norm_of_the_scaled_gradient() -> None:
    """A step by half of the gradient is then twice as long as one by the gradient, not half."""
    theirs: Any = optax.polyak_sgd(max_learning_rate=9.0, scaling=0.5)
    updates, _ = theirs.update(jax.numpy.full(1, 2.0), theirs.init(jax.numpy.ones(1)), jax.numpy.ones(1), value=1.0)
    ours = ReferenceOptimizer(rulec.load("polyak_sgd"), [np.ones(1)], {"lr": 0.5, "max_lr": 9.0})
    ours.step([np.full(1, 2.0)], inputs={"loss": 1.0})
    np.testing.assert_allclose([float(updates[0]), ours.params[0][0] - 1], [-1.0, -0.25], rtol=1e-6)
