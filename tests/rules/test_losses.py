"""Rules that read the loss, compared in float64 with optax and pytorch_optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import numpy as np
import optax
import pytest
import pytorch_optimizer
import torch

import rulec
import rulec.jax
import rulec.torch
from rulec.compiler.reference import ReferenceOptimizer
from tests.rules.passes import gradient_of, squared_norm, start

pytestmark = pytest.mark.peer

POLYAK = """
name: PolyakSGD
hyper: {lr: 1.0, max_lr: 1.0, f_min: 0, eps: 0}
inputs: {loss: scalar}
step: |
  n = sum(g*g, per="model")
  direction = g*where(n + eps <= machine_eps, 0, minimum((loss - f_min)/(n + eps), max_lr))
"""

MOMO = """
name: Momo
hyper: {lr: 1.0, beta: 0.9, lower: 0, weight_decay: 0}
inputs: {loss: scalar}
state: {m: 0, f: {init: 0, per: model}, gamma: {init: 0, per: model}}
step: |
  b = where(t == 1, 0, beta)
  m = b*m + (1 - b)*g
  f = b*f + (1 - b)*loss
  gamma = b*gamma + (1 - b)*sum(g*p, per="model")
  n = sum(m*m, per="model")
  gap = maximum((1 + lr*weight_decay)*(f - lower - gamma) + sum(m*p, per="model"), 0)
  p = p - lr*weight_decay/(1 + lr*weight_decay)*p - where(n <= machine_eps, 0, minimum(lr, gap/n))*m
"""

MOMO_ADAM = """
name: MomoAdam
hyper: {lr: 0.01, beta1: 0.9, beta2: 0.999, eps: 1e-8, lower: 0, weight_decay: 0}
inputs: {loss: scalar}
state: {m: 0, v: 0, f: {init: 0, per: model}, gamma: {init: 0, per: model}}
step: |
  m = beta1*m + (1 - beta1)*g
  v = beta2*v + (1 - beta2)*g*g
  f = beta1*f + (1 - beta1)*loss
  gamma = beta1*gamma + (1 - beta1)*sum(g*p, per="model")
  d = eps + sqrt(v/(1 - beta2**t))
  n = sum(m*m/d, per="model")
  gap = maximum((1 + lr*weight_decay)*(f - (1 - beta1**t)*lower - gamma) + sum(m*p, per="model"), 0)
  tau = where(n <= machine_eps, 0, minimum(lr/(1 - beta1**t), gap/n))
  p = p - lr*weight_decay/(1 + lr*weight_decay)*p - tau*m/d
"""

ALIG = """
name: AliG
hyper: {lr: {default: 0.1, min: 0}, momentum: 0.9}
inputs: {loss: scalar}
state: {m: 0}
step: |
  step_size = minimum(loss/(sum(g*g, per="model") + 1e-6), lr)
  m = momentum*m - step_size*g
  p = p - step_size*g + momentum*m
"""


def loss_of(params: Any) -> float:
    """A loss for the gradients of `gradient_of`: any number near zero will do."""
    return float(sum((np.asarray(p) ** 2).sum() for p in params)) / 10


class OptaxPeer:
    """A transformation of optax that takes the loss as `value`."""

    def __init__(self, tx: Any) -> None:
        self.tx = tx
        with jax.enable_x64(True):
            self.now = [jax.numpy.asarray(p) for p in start()]
            self.state = self.tx.init(self.now)

    def step(self) -> None:
        with jax.enable_x64(True):
            grads = gradient_of(jax.numpy)(self.now)
            updates, self.state = self.tx.update(grads, self.state, self.now, value=loss_of(self.now))
            self.now = optax.apply_updates(self.now, updates)

    def params(self) -> list[Any]:
        return [np.array(p) for p in self.now]


class AliGPeer:
    """pytorch_optimizer's AliG, with its norm in float64."""

    def __init__(self) -> None:
        self.tensors = [torch.nn.Parameter(torch.tensor(p)) for p in start()]
        self.optimizer: Any = pytorch_optimizer.AliG(self.tensors, max_lr=0.02, momentum=0.8, foreach=False)

    def step(self) -> None:
        now = self.params()
        for tensor, grad in zip(self.tensors, gradient_of()(now), strict=True):
            tensor.grad = torch.tensor(grad)
        with mock.patch("pytorch_optimizer.optimizer.alig.get_global_gradient_norm", squared_norm):
            self.optimizer.step(lambda: loss_of(now))

    def params(self) -> list[Any]:
        return [tensor.detach().numpy().copy() for tensor in self.tensors]


#: With another `scaling` optax's code takes the norm of the scaled gradient; its documentation, that of the gradient.
ROWS: dict[str, tuple[str, dict[str, float], Callable[[], Any]]] = {
    "polyak": (
        POLYAK, {"lr": 1.0, "max_lr": 0.05, "f_min": -0.1, "eps": 1e-3},
        lambda: OptaxPeer(optax.polyak_sgd(0.05, 1.0, -0.1, 1e-3)),
    ),
    "momo": (
        MOMO, {"lr": 0.2, "beta": 0.8, "lower": -0.1, "weight_decay": 0.05},
        lambda: OptaxPeer(optax.contrib.momo(0.2, 0.8, -0.1, 0.05)),
    ),
    "momo_adam": (
        MOMO_ADAM, {"lr": 0.05, "beta1": 0.8, "beta2": 0.95, "eps": 1e-6, "lower": -0.1, "weight_decay": 0.05},
        lambda: OptaxPeer(optax.contrib.momo_adam(0.05, 0.8, 0.95, 1e-6, -0.1, 0.05)),
    ),
    "alig": (ALIG, {"lr": 0.02, "momentum": 0.8}, AliGPeer),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_agrees_with_its_peer(name: str) -> None:
    text, hyper, make = ROWS[name]
    ours, theirs = ReferenceOptimizer(rulec.parse(text), start(), hyper), make()
    gradient = gradient_of()
    for _ in range(25):
        ours.step(gradient(ours.params), inputs={"loss": loss_of(ours.params)})
        theirs.step()
        for a, b in zip(ours.params, theirs.params(), strict=True):
            assert float(np.max(np.abs(a - b)) / np.max(np.abs(b))) < 1e-12
    assert any(np.abs(a - b).max() > 0.05 for a, b in zip(ours.params, start(), strict=True))


@pytest.mark.parametrize("name", ROWS)
def test_torch_jax_and_arrays_take_the_loss(name: str) -> None:
    text, hyper, _ = ROWS[name]
    rule, gradient = rulec.parse(text), gradient_of()
    reference, arrays = ReferenceOptimizer(rule, start(), hyper), start()
    tensors = [torch.nn.Parameter(torch.tensor(p)) for p in start()]
    on_arrays = rulec.array.Optimizer(rule, arrays, **hyper)
    betas = {"betas": (hyper["beta1"], hyper["beta2"])} if "beta1" in hyper else {}
    rest = {key: value for key, value in hyper.items() if key not in ("beta1", "beta2")}
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
            reference.step(gradient(reference.params), inputs={"loss": loss_of(reference.params)})
            on_arrays.step(gradient(arrays), loss=loss_of(arrays))
            in_torch.step(closure)
            grads = gradient_of(jax.numpy)(leaves)
            leaves, state = rulec.jax.step(rule, leaves, grads, state, loss=loss_of(leaves), **hyper)
    for expected, *results in zip(reference.params, arrays, tensors, leaves, strict=True):
        for one in results:
            value = one.detach().numpy() if isinstance(one, torch.Tensor) else one
            np.testing.assert_allclose(value, expected, rtol=0, atol=1e-13)
