"""Rows of rules that read the loss or the diagonal of the Hessian, beside optax and pytorch_optimizer in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any
from unittest import mock

import jax
import numpy as np
import optax
import pytorch_optimizer
import torch
from pytorch_optimizer.optimizer import emonavi

import rulec
from tests.rules.passes import gradient_of, squared_norm, start
from tests.rules.runs import Hyper


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


def moment_of(p: Any) -> Any:
    """A positive definite matrix of a parameter's columns, with eigenvalues apart; None for a vector."""
    if np.ndim(p) < 2:
        return None
    rows = np.cos(2 * np.asarray(p)).reshape(len(p), -1)
    return rows.T @ rows / len(rows) + np.diag(1 + np.arange(rows.shape[1])) / rows.shape[1]


def turned(p: Any) -> Any:
    return np.asarray(p).reshape(len(p), -1).T if np.ndim(p) > 1 else p


def inputs_of(rule: rulec.Rule, params: Any) -> dict[str, Any]:
    """What a rule reads beside gradients, at these parameters."""
    kinds: dict[str, Callable[[Any], Any]] = {
        "loss": loss_of, "hessian": hessian_of, "logits": logits_of,
        "a": lambda ps: [*map(moment_of, ps)], "b": lambda ps: [moment_of(turned(p)) for p in ps],
    }  # fmt: skip
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


class EnergyPeer:
    """AEGDM as its authors' code has it, line by line; without momentum it is AEGD."""

    def __init__(self, lr: float, c: float, momentum: float) -> None:
        self.lr, self.c, self.momentum = lr, c, momentum
        self.now, self.energy, self.buf = start(), [np.zeros(())] * 4, [np.zeros(())] * 4
        self.begun = False

    def step(self) -> None:
        root = np.sqrt(loss_of(self.now) + self.c)
        for i, df in enumerate(gradient_of()(self.now)):
            dg = df / (2 * root)
            energy = self.energy[i] if self.begun else root * np.ones_like(df)
            self.energy[i] = energy / (1 + 2 * self.lr * dg**2)
            self.buf[i] = self.buf[i] * self.momentum + dg
            self.now[i] = self.now[i] - 2 * self.lr * self.energy[i] * self.buf[i]
        self.begun = True

    def params(self) -> list[Any]:
        return [p.copy() for p in self.now]


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


@dataclass(frozen=True)
class InputPeer:
    """One row: a rule of ours that reads inputs, who else computes it, and what is changed in theirs."""

    composed: str
    theirs: str
    hyper: Hyper
    make: Callable[[], Any]
    note: str = ""

    def __str__(self) -> str:
        return f"{self.composed} = {self.theirs}"


class MomentPeer:
    """An algorithm on matrices and the second moments of a layer, line by line in NumPy; other tensors by `others`.

    `kept` are its values from step to step, for each matrix.
    """

    def __init__(self, hyper: Hyper, others: Callable[[list[Any]], Any]) -> None:
        self.hyper, self.t = hyper, 0
        self.tensors = [torch.nn.Parameter(torch.tensor(p)) for p in start()]
        self.kept: list[dict[str, Any]] = [{} for _ in self.tensors]
        self.others = others([t for t in self.tensors if t.ndim < 2])

    def step(self) -> None:
        self.t += 1
        now = self.params()
        for tensor, kept, p, grad in zip(self.tensors, self.kept, now, gradient_of()(now), strict=True):
            tensor.grad = torch.tensor(grad)
            if p.ndim > 1:
                update = self.direction(kept, grad.reshape(len(p), -1), moment_of(p), moment_of(turned(p)))
                tensor.data -= self.hyper["lr"] * torch.tensor(update.reshape(p.shape))
        self.others.step()

    def direction(self, kept: dict[str, Any], g: Any, a: Any, b: Any) -> Any:
        raise NotImplementedError

    def params(self) -> list[Any]:
        return [tensor.detach().numpy().copy() for tensor in self.tensors]


class KFACPeer(MomentPeer):
    """Algorithm 2 of Martens and Grosse, with its inverses by section 4.2 and damping by 6.3, for one layer."""

    def direction(self, kept: dict[str, Any], g: Any, a: Any, b: Any) -> Any:
        eps = min(1 - 1 / self.t, self.hyper["beta"])
        kept["A"] = eps * kept.get("A", np.zeros_like(a)) + (1 - eps) * a
        kept["G"] = eps * kept.get("G", np.zeros_like(b)) + (1 - eps) * b
        if self.t % self.hyper["every"] == 1:
            pi = np.sqrt((np.trace(kept["A"]) / len(a)) / (np.trace(kept["G"]) / len(b)))
            root = np.sqrt(self.hyper["damping"])
            kept["A_inv"] = np.linalg.inv(kept["A"] + pi * root * np.eye(len(a)))
            kept["G_inv"] = np.linalg.inv(kept["G"] + root / pi * np.eye(len(b)))
        return kept["G_inv"] @ g @ kept["A_inv"]


class FOOFPeer(MomentPeer):
    """Algorithm 1 of Benzing, for one layer."""

    def direction(self, kept: dict[str, Any], g: Any, a: Any, b: Any) -> Any:
        m = self.hyper["beta"]
        kept["sigma"] = m * kept.get("sigma", np.zeros_like(a)) + (1 - m) * a
        if self.t % self.hyper["every"] == 1:
            mean = kept["sigma"] / (1 - m**self.t)
            kept["P"] = np.linalg.inv(mean + self.hyper["damping"] * np.eye(len(a)))
        return g @ kept["P"]


class EKFACPeer(MomentPeer):
    """EKFAC-ra of George and others: their algorithm, where the scalings are a running mean of one batch's squares."""

    def direction(self, kept: dict[str, Any], g: Any, a: Any, b: Any) -> Any:
        m, decay = self.hyper["beta"], self.hyper["beta_s"]
        for key, moment in (("A", a), ("B", b)):
            kept[key] = m * kept.get(key, np.zeros_like(moment)) + (1 - m) * moment
            if self.t % self.hyper["every"] == 1:
                kept["U" + key] = np.linalg.eigh(kept[key])[1]
        m_kfe = kept["UB"].T @ g @ kept["UA"]
        kept["s"] = decay * kept.get("s", 0) + (1 - decay) * m_kfe**2
        return kept["UB"] @ (m_kfe / (kept["s"] + self.hyper["damping"])) @ kept["UA"].T


class NewtonMuonPeer(MomentPeer):
    """The code of Du and Su, for one matrix and in float64."""

    def direction(self, kept: dict[str, Any], g: Any, a: Any, b: Any) -> Any:
        h, size = self.hyper, len(a)
        if self.t == 1:
            kept |= {"cov": h["start"] * np.eye(size), "inverse": np.eye(size), "buffer": np.zeros_like(g)}
        if self.t % h["every"] == 0:
            kept["cov"] += (1 - h["beta"]) * (a - kept["cov"])
            ridge = np.diagonal(kept["cov"]).sum() / size * h["ridge"] + h["eps"]
            kept["inverse"] = np.linalg.inv(kept["cov"] + ridge * np.eye(size))
        g = g @ kept["inverse"]
        kept["buffer"] = h["momentum"] * kept["buffer"] + g
        x = g + h["momentum"] * kept["buffer"]
        tall = x.shape[0] > x.shape[1]
        x = x.T if tall else x
        x = x / np.linalg.norm(x)
        for _ in range(5):
            gram = x @ x.T
            x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
        return (x.T if tall else x) * max(g.shape) ** 0.5


def _moments(name: str, theirs: str, hyper: Hyper, kind: type[MomentPeer], note: str = "") -> InputPeer:
    def make() -> MomentPeer:
        if "adamw_lr" in hyper:
            words = {"lr": hyper["adamw_lr"], "weight_decay": hyper["weight_decay"], "foreach": False}
            return kind(hyper, lambda tensors: torch.optim.AdamW(tensors, **words))
        return kind(hyper, lambda tensors: torch.optim.SGD(tensors, lr=hyper["lr"], foreach=False))

    return InputPeer(name, theirs, hyper, make, note)


_EXACT = "theirs has its means in exact fractions, since rounding chooses between two equal numbers"

_LINES = "a transcription, line by line, of what theirs does to one matrix"

INPUTS: tuple[InputPeer, ...] = (
    _moments(
        "kfac", "the paper's algorithm", {"lr": 0.05, "beta": 0.8, "damping": 0.1, "every": 3}, KFACPeer, _LINES
    ),
    _moments(
        "foof", "the paper's algorithm", {"lr": 0.05, "beta": 0.8, "damping": 0.5, "every": 3}, FOOFPeer, _LINES
    ),
    _moments(
        "ekfac", "the paper's algorithm", {"lr": 0.01, "beta": 0.8, "beta_s": 0.9, "damping": 0.5, "every": 3},
        EKFACPeer, _LINES,
    ),
    _moments(
        "newton_muon", "the authors' code",
        {"lr": 0.01, "momentum": 0.8, "beta": 0.7, "ridge": 0.3, "eps": 1e-8, "start": 0.5, "every": 3,
         "adamw_lr": 0.05, "weight_decay": 0.0}, NewtonMuonPeer, _LINES,
    ),
    InputPeer(
        "polyak_sgd", "optax.polyak_sgd",
        {"lr": 1.0, "max_lr": 0.05, "f_min": -0.1, "eps": 1e-3},
        lambda: OptaxPeer(optax.polyak_sgd(0.05, 1.0, -0.1, 1e-3)),
        "with a `scaling` of 1: with another, its code takes the norm of the scaled gradient",
    ),
    InputPeer(
        "momo", "optax.contrib.momo",
        {"lr": 0.2, "beta": 0.8, "lower": -0.1, "weight_decay": 0.05},
        lambda: OptaxPeer(optax.contrib.momo(0.2, 0.8, -0.1, 0.05)),
    ),
    InputPeer(
        "momo_adam", "optax.contrib.momo_adam",
        {"lr": 0.05, "beta1": 0.8, "beta2": 0.95, "eps": 1e-6, "lower": -0.1, "weight_decay": 0.05},
        lambda: OptaxPeer(optax.contrib.momo_adam(0.05, 0.8, 0.95, 1e-6, -0.1, 0.05)),
    ),
    InputPeer(
        "transforms/reduce_on_plateau", "optax.contrib.reduce_on_plateau",
        _PLATEAU,
        lambda: OptaxPeer(
            optax.chain(optax.sgd(0.05), optax.contrib.reduce_on_plateau(0.5, 2, 0.3, 0.0, 1, 2, min_scale=0.1))
        ),
    ),
    InputPeer(
        "alig", "pytorch_optimizer.AliG",
        {"lr": 0.02, "momentum": 0.8, "eps": 1e-6}, AliGPeer,
        "theirs takes norms in float64",
    ),
    InputPeer(
        "aegd", "the formulas of the authors' code",
        {"lr": 0.2, "c": 0.7}, lambda: EnergyPeer(0.2, 0.7, 0.0),
    ),
    InputPeer(
        "aegdm", "the formulas of the authors' code",
        {"lr": 0.1, "c": 0.7, "momentum": 0.8}, lambda: EnergyPeer(0.1, 0.7, 0.8),
    ),
    InputPeer(
        "sophia + decay", "pytorch_optimizer.SophiaH",
        _SOPHIA, lambda: sophia(_SOPHIA),
        "theirs is the paper's first version: it has lr/gamma, eps/gamma, and gamma times the decay",
    ),
    InputPeer(
        "adahessian", "pytorch_optimizer.AdaHessian",
        {"lr": 0.05, **_BETAS, "eps": 1e-3, "power": 0.7},
        lambda: CurvaturePeer(
            pytorch_optimizer.AdaHessian, lr=0.05, betas=(0.8, 0.95), eps=1e-3, hessian_power=0.7, weight_decay=0
        ),
    ),
    InputPeer(
        "emo_drive >> sgd", "pytorch_optimizer.optimizer.emonavi.get_emo_drive",
        {"lr": 0.05}, lambda: EmoPeer(_DrivenSGD, lr=0.05),
        f"a function of theirs, around gradient descent by hand; {_EXACT}",
    ),
    InputPeer(
        "emonavi", "pytorch_optimizer.EmoNavi",
        {"lr": 1.0, **_BETAS, "eps": 1e-3, "weight_decay": 0.05},
        lambda: EmoPeer(pytorch_optimizer.EmoNavi, lr=1.0, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.05),
        _EXACT,
    ),
    InputPeer(
        "emolynx", "pytorch_optimizer.EmoLynx",
        {"lr": 0.2, **_BETAS, "weight_decay": 0.05},
        lambda: EmoPeer(pytorch_optimizer.EmoLynx, lr=0.2, betas=(0.8, 0.95), weight_decay=0.05),
        _EXACT,
    ),
    InputPeer(
        "emofact", "pytorch_optimizer.EmoFact",
        {"lr": 0.2, "beta1": 0.8, "weight_decay": 0.05},
        lambda: EmoPeer(pytorch_optimizer.EmoFact, lr=0.2, betas=(0.8, 0.95), weight_decay=0.05),
        _EXACT,
    ),
    InputPeer(
        "qk_clip(adamw)", "pytorch_optimizer.MuonClip",
        {"lr": 0.05, **_BETAS, "eps": 1e-3, "weight_decay": 0.05, "qk_threshold": 0.4, "qk_power": 0.6},
        lambda: ClipPeer(
            adamw_lr=0.05, adamw_betas=(0.8, 0.95), adamw_eps=1e-3, adamw_wd=0.05, qk_clip_threshold=0.4,
            qk_clip_alpha=0.6,
        ),
        "theirs has AdamW for all tensors, which are queries with a head for each row, and computes in float64",
    ),
)  # fmt: skip
