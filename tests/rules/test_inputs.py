"""Rules that read the loss or the diagonal of the Hessian, in float64 beside optax and pytorch_optimizer."""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any
from unittest import mock

import jax
import numpy as np
import optax
import pytest
import pytorch_optimizer
import torch
from pytorch_optimizer.optimizer import emonavi

import rulec
import rulec.jax
import rulec.torch
from rulec.compiler.reference import ReferenceOptimizer
from tests.rules.passes import gradient_of, squared_norm, start

pytestmark = pytest.mark.peer


def loss_of(params: Any) -> float:
    """A loss for the gradients of `gradient_of`: any number near zero will do."""
    return float(sum((np.asarray(p) ** 2).sum() for p in params)) / 10


def hessian_of(params: Any) -> list[Any]:
    """A diagonal for the gradients of `gradient_of`, with elements above and below zero."""
    return [np.asarray(0.3 + np.cos(3 * np.asarray(p))) for p in params]


def logits_of(params: Any) -> list[Any]:
    """A largest logit for every row, of the shape of the parameter; a number has none."""

    def largest(p: Any) -> Any:
        rest = tuple(range(1, p.ndim))
        return np.abs(p).max(rest, keepdims=True) * np.ones_like(p) if p.ndim else np.zeros(())

    return [largest(np.asarray(p)) for p in params]


def inputs_of(rule: rulec.Rule, params: Any) -> dict[str, Any]:
    """What a rule reads beside gradients, at these parameters."""
    kinds = {"loss": loss_of, "hessian": hessian_of, "logits": logits_of}
    return {name: kinds[name](params) for name in rule.inputs}


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


class CurvaturePeer:
    """An optimizer of pytorch_optimizer that takes the diagonal of the Hessian, at every step or every few."""

    def __init__(self, kind: Any, every: int = 1, **keywords: Any) -> None:
        self.tensors = [torch.nn.Parameter(torch.tensor(p)) for p in start()]
        self.optimizer, self.every, self.count = kind(self.tensors, foreach=False, **keywords), every, 0

    def step(self) -> None:
        now = self.params()
        for tensor, grad in zip(self.tensors, gradient_of()(now), strict=True):
            tensor.grad = torch.tensor(grad)
        read = self.count % self.every == 0
        self.optimizer.step(hessian=[torch.tensor(h) for h in hessian_of(now)] if read else None)
        self.count += 1

    def params(self) -> list[Any]:
        return [tensor.detach().numpy().copy() for tensor in self.tensors]


class EmoPeer:
    """An optimizer of pytorch_optimizer that follows the loss, whose means are exact.

    Its scalar is that of one mean or another by which of two equal numbers is smaller, as rounding has it.
    """

    def __init__(self, kind: Any, **keywords: Any) -> None:
        self.tensors = [torch.nn.Parameter(torch.tensor(p)) for p in start()]
        self.optimizer = kind(self.tensors, foreach=False, **keywords)

    def step(self) -> None:
        now = self.params()
        for tensor, grad in zip(self.tensors, gradient_of()(now), strict=True):
            tensor.grad = torch.tensor(grad)
        with mock.patch.object(emonavi, "compute_scalar", _exact_scalar):
            self.optimizer.step(lambda: loss_of(now))

    def params(self) -> list[Any]:
        return [tensor.detach().numpy().copy() for tensor in self.tensors]


_scalar = emonavi.compute_scalar


def _exact_scalar(ema: dict[str, float]) -> float:
    return _scalar({name: Fraction(value) for name, value in ema.items()})  # type: ignore[misc]


class _DrivenSGD(torch.optim.Optimizer):
    """Gradient descent with steps that pytorch_optimizer's means of the loss lengthen."""

    def __init__(self, tensors: Any, lr: float, foreach: bool) -> None:
        super().__init__(tensors, {"lr": lr})
        self.means: dict[str, Any] = {}

    def step(self, closure: Any = None) -> None:
        drive, _, _ = emonavi.get_emo_drive(self.means, closure(), False)
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                p -= self.param_groups[0]["lr"] * drive * p.grad


class ClipPeer:
    """pytorch_optimizer's MuonClip with AdamW for all tensors, which are queries with a head for each row."""

    def __init__(self, **keywords: Any) -> None:
        self.tensors = [torch.nn.Parameter(torch.tensor(p)) for p in start()]
        groups = [
            {"params": [t], "use_muon": False, **({"qk_clip": "query", "attention_name": str(i)} if t.ndim else {})}
            for i, t in enumerate(self.tensors)
        ]
        self.optimizer = pytorch_optimizer.MuonClip(groups, foreach=False, **keywords)

    def step(self) -> None:
        now = self.params()
        for tensor, grad in zip(self.tensors, gradient_of()(now), strict=True):
            tensor.grad = torch.tensor(grad)
        heads = {str(i): torch.tensor(x.reshape(len(x), -1)[:, 0]) for i, x in enumerate(logits_of(now)) if x.ndim}
        with mock.patch("torch.Tensor.float", torch.Tensor.double):
            self.optimizer.step(attention_max_logits=heads)

    def params(self) -> list[Any]:
        return [tensor.detach().numpy().copy() for tensor in self.tensors]


def sophia(hyper: dict[str, float]) -> CurvaturePeer:
    """Theirs has the form of the paper's first version: gamma is a bound there, and in lr, eps and the decay."""
    gamma, k = hyper["gamma"], int(hyper["k"])
    return CurvaturePeer(
        pytorch_optimizer.SophiaH, k, lr=hyper["lr"] / gamma, betas=(hyper["beta1"], hyper["beta2"]), p=gamma,
        eps=hyper["eps"] / gamma, update_period=k, weight_decay=hyper["weight_decay"] * gamma,
    )  # fmt: skip


_BETAS = {"beta1": 0.8, "beta2": 0.95}
_SOPHIA = {"lr": 0.05, **_BETAS, "eps": 1e-3, "gamma": 0.3, "k": 3, "weight_decay": 0.1}

_PLATEAU = {
    "lr": 0.05, "shrink": 0.5, "patience": 2, "rtol": 0.3, "atol": 0, "cooldown": 1, "window": 2, "least": 0.1,
}  # fmt: skip

#: With another `scaling` optax's code takes the norm of the scaled gradient; its documentation, that of the gradient.
ROWS: dict[str, tuple[dict[str, float], Callable[[], Any]]] = {
    "polyak_sgd": (
        {"lr": 1.0, "max_lr": 0.05, "f_min": -0.1, "eps": 1e-3},
        lambda: OptaxPeer(optax.polyak_sgd(0.05, 1.0, -0.1, 1e-3)),
    ),
    "momo": (
        {"lr": 0.2, "beta": 0.8, "lower": -0.1, "weight_decay": 0.05},
        lambda: OptaxPeer(optax.contrib.momo(0.2, 0.8, -0.1, 0.05)),
    ),
    "momo_adam": (
        {"lr": 0.05, "beta1": 0.8, "beta2": 0.95, "eps": 1e-6, "lower": -0.1, "weight_decay": 0.05},
        lambda: OptaxPeer(optax.contrib.momo_adam(0.05, 0.8, 0.95, 1e-6, -0.1, 0.05)),
    ),
    "transforms/reduce_on_plateau": (
        _PLATEAU,
        lambda: OptaxPeer(
            optax.chain(optax.sgd(0.05), optax.contrib.reduce_on_plateau(0.5, 2, 0.3, 0.0, 1, 2, min_scale=0.1))
        ),
    ),
    "alig": ({"lr": 0.02, "momentum": 0.8, "eps": 1e-6}, AliGPeer),
    "sophia + decay": (_SOPHIA, lambda: sophia(_SOPHIA)),
    "adahessian": (
        {"lr": 0.05, **_BETAS, "eps": 1e-3, "power": 0.7},
        lambda: CurvaturePeer(
            pytorch_optimizer.AdaHessian, lr=0.05, betas=(0.8, 0.95), eps=1e-3, hessian_power=0.7, weight_decay=0
        ),
    ),
    "emo_drive >> sgd": ({"lr": 0.05}, lambda: EmoPeer(_DrivenSGD, lr=0.05)),
    "emonavi": (
        {"lr": 1.0, **_BETAS, "eps": 1e-3, "weight_decay": 0.05},
        lambda: EmoPeer(pytorch_optimizer.EmoNavi, lr=1.0, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.05),
    ),
    "emolynx": (
        {"lr": 0.2, **_BETAS, "weight_decay": 0.05},
        lambda: EmoPeer(pytorch_optimizer.EmoLynx, lr=0.2, betas=(0.8, 0.95), weight_decay=0.05),
    ),
    "emofact": (
        {"lr": 0.2, "beta1": 0.8, "weight_decay": 0.05},
        lambda: EmoPeer(pytorch_optimizer.EmoFact, lr=0.2, betas=(0.8, 0.95), weight_decay=0.05),
    ),
    "qk_clip(adamw)": (
        {"lr": 0.05, **_BETAS, "eps": 1e-3, "weight_decay": 0.05, "qk_threshold": 0.4, "qk_power": 0.6},
        lambda: ClipPeer(
            adamw_lr=0.05, adamw_betas=(0.8, 0.95), adamw_eps=1e-3, adamw_wd=0.05, qk_clip_threshold=0.4,
            qk_clip_alpha=0.6,
        ),
    ),
}  # fmt: skip


def test_every_rule_with_inputs_has_a_row() -> None:
    named = {re.split(r"[ (]", name.removeprefix("transforms/"))[0] for name in ROWS}
    assert {name.removeprefix("transforms/") for name in rulec.rules() if rulec.load(name).inputs} == named


@pytest.mark.parametrize("name", ROWS)
def test_agrees_with_its_peer(name: str) -> None:
    hyper, make = ROWS[name]
    rule = rulec.load(name)
    ours, theirs = ReferenceOptimizer(rule, start(), hyper), make()
    gradient = gradient_of()
    for _ in range(25):
        ours.step(gradient(ours.params), inputs=inputs_of(rule, ours.params))
        theirs.step()
        for a, b in zip(ours.params, theirs.params(), strict=True):
            assert float(np.max(np.abs(a - b)) / np.max(np.abs(b))) < 1e-12
    assert any(np.abs(a - b).max() > 0.05 for a, b in zip(ours.params, start(), strict=True))


@pytest.mark.parametrize("name", ROWS)
def test_torch_jax_and_arrays_take_the_inputs(name: str) -> None:
    hyper, _ = ROWS[name]
    rule, gradient = rulec.load(name), gradient_of()
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
            in_torch.step(closure, inputs={k: [*map(torch.tensor, v)] for k, v in inputs.items() if k != "loss"})
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
