"""Wrappers with passes beside implementations that are not ours: both take their gradients from one function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import jax
import numpy as np
import optax
import pytorch_optimizer
import torch

from rulec.array_api import random
from tests.rules.runs import Array, Hyper

#: Gradients at parameters.
Gradient = Callable[[Sequence[Any]], list[Any]]

SHAPES = ((3, 4), (5,), (), (2, 3, 2))


def gradient_of(numpy: Any = np) -> Gradient:
    """The gradients of a function that is not quadratic, in float64: a matrix joins all parameters, and sines bend it.

    `numpy` is the library of the arrays.
    """
    rng = np.random.default_rng(7)
    sizes = [int(np.prod(shape)) for shape in SHAPES]
    matrix = rng.normal(size=(sum(sizes), sum(sizes)))
    matrix = matrix @ matrix.T / sum(sizes) + np.eye(sum(sizes))

    def gradient(params: Sequence[Any]) -> list[Any]:
        x = numpy.concatenate([numpy.reshape(p, -1) for p in params])
        g = matrix @ x + numpy.sin(3 * x)
        parts = numpy.split(g, np.cumsum(sizes)[:-1])
        return [numpy.reshape(part, shape) for part, shape in zip(parts, SHAPES, strict=True)]

    return gradient


def start() -> list[Array]:
    """Parameters to begin with."""
    rng = np.random.default_rng(3)
    return [np.asarray(rng.normal(size=shape)) for shape in SHAPES]


class TorchPeer:
    """An optimizer of pytorch_optimizer that takes a closure; `twice` where the closure gives the first gradient too.

    Its global norm is summed in float64: as shipped, that is rounded to float32.
    """

    def __init__(self, make: Callable[[list[Any]], Any], twice: bool) -> None:
        self.gradient, self.twice = gradient_of(), twice
        self.tensors = [torch.nn.Parameter(torch.tensor(p)) for p in start()]
        self.optimizer = make(self.tensors)

    def closure(self) -> Any:
        """Writes the gradients where the parameters are."""
        for tensor, grad in zip(self.tensors, self.gradient([t.detach().numpy() for t in self.tensors]), strict=True):
            tensor.grad = torch.tensor(grad)
        return torch.zeros(())

    def step(self) -> None:
        with mock.patch("pytorch_optimizer.optimizer.sam.get_global_gradient_norm", squared_norm):
            if not self.twice:
                self.closure()
            self.optimizer.step(self.closure)

    def params(self) -> list[Array]:
        return [tensor.detach().numpy().copy() for tensor in self.tensors]


def squared_norm(groups: Any, device: Any = None, *, weight_adaptive: bool = False) -> Any:
    """Their sum of squares, in float64."""
    adaptive = weight_adaptive and groups[0].get("adaptive", False)
    params = [p for group in groups for p in group["params"]]
    scaled = [p.grad * p.abs() if adaptive else p.grad for p in params]
    return sum((g.double() ** 2).sum() for g in scaled).reshape(1)  # type: ignore[union-attr]


class OptaxSAM:
    """optax.contrib.sam around SGD, in its opaque mode."""

    def __init__(self, hyper: Hyper) -> None:
        climb = optax.chain(optax.contrib.normalize(), optax.sgd(hyper["rho"]))
        self.tx: Any = optax.contrib.sam(optax.sgd(hyper["lr"]), climb, sync_period=2, opaque_mode=True)
        with jax.enable_x64(True):
            self.now = [jax.numpy.asarray(p) for p in start()]
            self.state = self.tx.init(self.now)

    def step(self) -> None:
        gradient = gradient_of(jax.numpy)
        with jax.enable_x64(True):
            grads = gradient(self.now)
            updates, self.state = self.tx.update(grads, self.state, self.now, grad_fn=lambda p, _: gradient(p))
            self.now = optax.apply_updates(self.now, updates)

    def params(self) -> list[Array]:
        return [np.array(p) for p in self.now]


class VarianceSuppressed:
    """VaSSO of Li and Giannakis (2023) around torch's AdamW. As in their code, the mean begins as a gradient."""

    def __init__(self, hyper: Hyper) -> None:
        self.hyper, self.gradient = hyper, gradient_of()
        self.tensors = [torch.nn.Parameter(torch.tensor(p)) for p in start()]
        self.d: list[Array] = []
        self.optimizer = torch.optim.AdamW(self.tensors, **_adamw(hyper))

    def step(self) -> None:
        now, theta = self.params(), self.hyper["theta"]
        grads = self.gradient(now)
        self.d = [(1 - theta) * d + theta * g for d, g in zip(self.d or grads, grads, strict=True)]
        length = np.sqrt(sum(float((d**2).sum()) for d in self.d))
        climbed = [p + self.hyper["rho"] * d / length for p, d in zip(now, self.d, strict=True)]
        for tensor, grad in zip(self.tensors, self.gradient(climbed), strict=True):
            tensor.grad = torch.tensor(grad)
        self.optimizer.step()

    def params(self) -> list[Array]:
        return [tensor.detach().numpy().copy() for tensor in self.tensors]


class Korpelevich:
    """The extragradient method: a step to where the gradient is taken, and one from where it was."""

    def __init__(self, hyper: Hyper) -> None:
        self.lr, self.now, self.gradient = hyper["lr"], start(), gradient_of()

    def step(self) -> None:
        ahead = [p - self.lr * g for p, g in zip(self.now, self.gradient(self.now), strict=True)]
        self.now = [p - self.lr * g for p, g in zip(self.now, self.gradient(ahead), strict=True)]

    def params(self) -> list[Array]:
        return [p.copy() for p in self.now]


class BayesianSAM:
    """The authors' code of Möllenhoff and Khan (2023), without parts of a batch; our random numbers, none at first."""

    def __init__(self, hyper: Hyper) -> None:
        self.hyper, self.w, self.gradient, self.t = hyper, start(), gradient_of(), 0
        self.gm = [np.zeros_like(w) for w in self.w]
        self.s = [np.full_like(w, hyper["initial"]) for w in self.w]

    def noise(self, i: int) -> Array:
        """The distance of the random point, by the numbers that are drawn at the end of the last step."""
        if not self.t:
            return np.zeros_like(self.w[i])
        drawn = random.normal(self.w[i].size // self.copies(i), seed=0, tensor=i, draw=0, step=self.t)
        return np.sqrt(1 / (self.hyper["num_data"] * self.s[i])) * drawn.reshape(self.w[i].shape[-2:])

    def copies(self, i: int) -> int:
        """The matrices of a tensor, which have the same draw."""
        return int(np.prod(self.w[i].shape[:-2]))

    def step(self) -> None:
        h = self.hyper
        noisy = self.gradient([w + self.noise(i) for i, w in enumerate(self.w)])
        self.t += 1
        grads = self.gradient([w + h["rho"] * g / s for w, g, s in zip(self.w, noisy, self.s, strict=True)])
        for i, (w, g) in enumerate(zip(self.w, grads, strict=True)):
            self.gm[i] = h["beta1"] * self.gm[i] + (1 - h["beta1"]) * (g + h["weight_decay"] * w)
            self.w[i] = w - h["lr"] * self.gm[i] / self.s[i]
            gs = np.sqrt(self.s[i] * noisy[i] ** 2)
            self.s[i] = h["beta2"] * self.s[i] + (1 - h["beta2"]) * (gs + h["damping"] + h["weight_decay"])

    def params(self) -> list[Array]:
        return [w.copy() for w in self.w]


@dataclass(frozen=True)
class PassPeer:
    """One row: a composition of ours with these hyper-parameters, and who else computes it."""

    composed: str
    theirs: str
    hyper: Hyper
    make: Callable[[Hyper], Any]
    note: str = "theirs takes norms in float64"

    def __str__(self) -> str:
        return f"{self.composed} = {self.theirs}"


def _adamw(h: Hyper) -> dict[str, Any]:
    return {
        "lr": h["lr"], "betas": (h["beta1"], h["beta2"]), "eps": h["eps"], "weight_decay": h["weight_decay"],
        "foreach": False,
    }  # fmt: skip


def _around(name: str, *names: str, **fixed: Any) -> Callable[[Hyper], TorchPeer]:
    """pytorch_optimizer's wrapper of that name around torch's AdamW."""
    kind = getattr(pytorch_optimizer, name)
    return lambda h: TorchPeer(
        lambda params: kind(params, torch.optim.AdamW, **{key: h[key] for key in names}, **fixed, **_adamw(h)), False
    )


class _GSAM(TorchPeer):
    """Theirs takes a closure that gives outputs and loss."""

    def closure(self) -> Any:
        return None, super().closure()


def _gsam(h: Hyper) -> TorchPeer:
    rho: Any = mock.Mock(step=lambda: h["rho"])
    return _GSAM(
        lambda params: pytorch_optimizer.GSAM(
            params, torch.optim.AdamW(params, **_adamw(h)), torch.nn.Linear(1, 1), rho, h["alpha"], foreach=False
        ),
        True,
    )


def _wsam(h: Hyper) -> TorchPeer:
    # Their eps is that of the climb; AdamW's is torch's default.
    return TorchPeer(
        lambda params: pytorch_optimizer.WSAM(
            torch.nn.Linear(1, 1),
            params,
            torch.optim.AdamW,
            rho=h["rho"],
            gamma=h["gamma"],
            **{**_adamw(h), "eps": h["sam_eps"]},
        ),
        True,
    )


_ADAMW = {"lr": 0.02, "beta1": 0.8, "beta2": 0.95, "eps": 1e-6, "weight_decay": 0.1}

#: Every wrapper with passes, each beside at least one other implementation.
PASSES: tuple[PassPeer, ...] = (
    PassPeer("sam(adamw)", "pytorch_optimizer.SAM", {**_ADAMW, "rho": 0.1}, _around("SAM", "rho")),
    PassPeer("sam(sgd)", "optax.contrib.sam", {"lr": 0.05, "rho": 0.1, "sam_eps": 0}, OptaxSAM, ""),
    PassPeer(
        "vasso(adamw)", "the paper's algorithm around torch.optim.AdamW",
        {**_ADAMW, "rho": 0.1, "theta": 0.3, "sam_eps": 0}, VarianceSuppressed, "",
    ),
    PassPeer(
        "bsam", "the authors' code",
        {
            "lr": 0.05, "beta1": 0.8, "beta2": 0.9, "weight_decay": 0.1, "rho": 0.1, "damping": 0.3, "num_data": 50,
            "initial": 1.2,
        },
        BayesianSAM, "with our random numbers, and none in the first step",
    ),
    PassPeer("extragradient(sgd)", "the method as it is printed", {"lr": 0.05}, Korpelevich, ""),
    PassPeer("asam(adamw)", "pytorch_optimizer.SAM", {**_ADAMW, "rho": 0.3}, _around("SAM", "rho", adaptive=True)),
    PassPeer("gsam(adamw)", "pytorch_optimizer.GSAM", {**_ADAMW, "rho": 0.1, "alpha": 0.3}, _gsam),
    PassPeer(
        "looksam(adamw)", "pytorch_optimizer.LookSAM", {**_ADAMW, "rho": 0.1, "k": 3, "alpha": 0.6},
        _around("LookSAM", "rho", "k", "alpha"),
    ),
    PassPeer(
        "friendly_sam(adamw)", "pytorch_optimizer.FriendlySAM", {**_ADAMW, "rho": 0.1, "sigma": 0.9, "lmbda": 0.7},
        _around("FriendlySAM", "rho", "sigma", "lmbda"),
    ),
    PassPeer(
        "wsam(adamw)", "pytorch_optimizer.WSAM",
        {**_ADAMW, "eps": 1e-8, "sam_eps": 1e-6, "rho": 0.1, "gamma": 0.7}, _wsam,
    ),
)  # fmt: skip
