"""Rows of wrappers that change what a step leaves of the parameter: decay of several kinds, bounds, lookahead."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax
import pytorch_optimizer
import torch

from tests.rules.printed_decomposed import orthogonal
from tests.rules.runs import Array, Hyper, OptaxRun, Run, TorchRun
from tests.rules.wrapper_peer import Start, WrapperPeer

_ADAM = {"lr": 0.03, "beta1": 0.8, "beta2": 0.95, "eps": 1e-6}
_DECAYED = {**_ADAM, "decay_rate": 0.07, "max_lr": 0.05}


def _adam(h: Hyper, weight_decay: float) -> Mapping[str, Any]:
    return {"lr": h["lr"], "betas": (h["beta1"], h["beta2"]), "eps": h["eps"], "weight_decay": weight_decay}


def _torch(kind: Any, keywords: Callable[[Hyper], Mapping[str, Any]]) -> Start:
    return lambda params, hyper: TorchRun(kind, keywords, params, hyper)


def _nonnegative(params: Sequence[Array], hyper: Hyper) -> Run:
    def make(h: Hyper) -> Any:
        adam = optax.adam(h["lr"], b1=h["beta1"], b2=h["beta2"], eps=h["eps"])
        return optax.chain(adam, optax.keep_params_nonnegative())

    return OptaxRun(make, params, hyper)


def _ranger(tensors: Any, **keywords: Any) -> Any:
    """Ranger that descends while its variance is unknown: as pytorch_optimizer ships it, it climbs there."""
    return pytorch_optimizer.Ranger(tensors, degenerated_to_sgd=True, **keywords)


class Slowly(TorchRun):
    """torch's Adam, with copies of the first weights, and something of its own after a step."""

    def __init__(self, params: Sequence[Array], hyper: Hyper) -> None:
        super().__init__(torch.optim.Adam, lambda h: _adam(h, 0), params, hyper)
        self.slow = [tensor.detach().clone() for tensor in self.tensors]
        self.t = 0

    def step(self, grads: Sequence[Array], hyper: Hyper) -> None:
        super().step(grads, hyper)
        self.t += 1
        with torch.no_grad():
            self.after(hyper)

    def after(self, hyper: Hyper) -> None:
        """What follows a step of Adam."""
        raise NotImplementedError


class Snoo(Slowly):
    """Every k steps of Adam, torch's SGD takes a step from the slow weights, whose gradient is the way back to them."""

    def __init__(self, params: Sequence[Array], hyper: Hyper) -> None:
        super().__init__(params, hyper)
        outer = {"lr": hyper["outer_lr"], "momentum": hyper["outer_momentum"], "nesterov": True}
        self.outer = torch.optim.SGD(self.slow, **outer)

    def after(self, hyper: Hyper) -> None:
        if self.t % hyper["k"]:
            return
        for slow, fast in zip(self.slow, self.tensors, strict=True):
            slow.grad = slow - fast
        self.outer.step()
        for slow, fast in zip(self.slow, self.tensors, strict=True):
            fast.copy_(slow)


class SlowMo(Slowly):
    """Algorithm 1 of Wang and others (2019), with one worker and Adam as its base optimizer."""

    def after(self, hyper: Hyper) -> None:
        if self.t == 1:
            self.u = [torch.zeros_like(slow) for slow in self.slow]
        if self.t % hyper["k"]:
            return
        for u, slow, fast in zip(self.u, self.slow, self.tensors, strict=True):
            u.copy_(hyper["slow_momentum"] * u + 1 / hyper["lr"] * (slow - fast))
            slow.sub_(hyper["slow_lr"] * hyper["lr"] * u)
            fast.copy_(slow)


class SwitchEMA(Slowly):
    """Algorithm 1 of Li and others (2024), where k steps are an epoch."""

    def after(self, hyper: Hyper) -> None:
        for average, fast in zip(self.slow, self.tensors, strict=True):
            average.lerp_(fast, 1 - hyper["ema_decay"])
            if self.t % hyper["k"] == 0:
                fast.copy_(average)


class RadialBrake(Slowly):
    """The hook of emerging-optimizers around Adam: each norm goes a share of its way."""

    def after(self, hyper: Hyper) -> None:
        for before, now in zip(self.slow, self.tensors, strict=True):
            grown = now.norm() - before.norm()
            share = hyper["outward_scale"] if grown > 0 else hyper["inward_scale"]
            now.mul_((before.norm() + share * grown) / now.norm())
            before.copy_(now)


class ClipWeights(Slowly):
    """Adam with its weights clamped by torch, as in Wasserstein GANs."""

    def after(self, hyper: Hyper) -> None:
        for now in self.tensors:
            now.clamp_(-hyper["weight_bound"], hyper["weight_bound"])


class MaxNorm(Slowly):
    """Adam, each row of whose tensors optax projects onto a ball; what is no matrix stays."""

    def after(self, hyper: Hyper) -> None:
        project = jax.vmap(lambda row: optax.projections.projection_l2_ball(row, hyper["row_norm"]))
        with jax.enable_x64(True):
            for now in self.tensors:
                if now.ndim > 1:
                    now.copy_(torch.tensor(np.array(project(jax.numpy.asarray(now.detach().numpy())))))


class BEMA(Slowly):
    """Algorithm 1 of Block and Zhang (2025) around Adam, without a burn-in, at every step."""

    def after(self, hyper: Hyper) -> None:
        if self.t == 1:
            self.ema = [slow.clone() for slow in self.slow]
        alpha, beta = ((hyper["lag"] + hyper["multiplier"] * self.t) ** -hyper[f"{k}_power"] for k in ("bias", "ema"))
        self.ema = [(1 - beta) * ema + beta * now.detach() for ema, now in zip(self.ema, self.tensors, strict=True)]
        self.mean = [
            alpha * (now.detach() - first) + ema
            for now, first, ema in zip(self.tensors, self.slow, self.ema, strict=True)
        ]

    def params(self) -> list[Array]:
        return [mean.numpy().copy() for mean in self.mean]


class SWA(Slowly):
    """torch's plain averages of the weights of some steps; those of Adam are compared until there is one."""

    def after(self, hyper: Hyper) -> None:
        if self.t == 1:
            modules = torch.nn.ParameterList(self.tensors)
            self.averaged = torch.optim.swa_utils.AveragedModel(modules)
        counted, left = divmod(self.t - int(hyper["swa_start"]), int(hyper["swa_every"]))
        if counted > 0 and not left:
            self.averaged.update_parameters(torch.nn.ParameterList(self.tensors))

    def params(self) -> list[Array]:
        averages = list(self.averaged.parameters()) if self.t and self.averaged.n_averaged else self.tensors
        return [tensor.detach().numpy().copy() for tensor in averages]


class SpectralDecay(Slowly):
    """Adam, and a step along the nuclear norm's gradient by the polynomials of its singular values."""

    def after(self, hyper: Hyper) -> None:
        for now in self.tensors:
            if now.ndim > 1:
                matrix = now.detach().numpy().reshape(len(now), -1)
                step = orthogonal(matrix, int(hyper["ns_steps"])).reshape(now.shape)
                now.sub_(hyper["lr"] * hyper["spectral_rate"] * torch.tensor(step))


_ANEW = "theirs has another weight decay before every step, for the same length of decay"

#: torch's AdamW decays by lr times its weight decay, which is given anew before every step.
DECAYS: tuple[WrapperPeer, ...] = (
    WrapperPeer(
        "fully_decoupled(adam)", "torch.optim.AdamW", _DECAYED,
        _torch(torch.optim.AdamW, lambda h: _adam(h, h["decay_rate"] / h["max_lr"])),
        note=_ANEW,
    ),
    WrapperPeer(
        "corrected_decay(adam)", "torch.optim.AdamW", _DECAYED,
        _torch(torch.optim.AdamW, lambda h: _adam(h, h["decay_rate"] * h["lr"] / h["max_lr"])),
        note=_ANEW,
    ),
    WrapperPeer(
        "fixed_decay(lion)", "pytorch_optimizer.Lion",
        {"lr": 0.01, "beta1": 0.8, "beta2": 0.95, "weight_decay": 0.0, "decay_rate": 0.07},
        _torch(
            pytorch_optimizer.Lion,
            lambda h: {
                "lr": h["lr"], "betas": (h["beta1"], h["beta2"]), "weight_decay": h["decay_rate"], "fixed_decay": True,
            },
        ),
    ),
    WrapperPeer(
        "centralize >> lookahead(radam)", "pytorch_optimizer.Ranger", {**_ADAM, "k": 4, "alpha": 0.3},
        _torch(_ranger, lambda h: {**_adam(h, 0), "k": int(h["k"]), "alpha": h["alpha"]}),
        note="with `degenerated_to_sgd`, without which theirs climbs at first",
    ),
    WrapperPeer(
        "snoo(adam)", "torch.optim.SGD around torch.optim.Adam",
        {**_ADAM, "k": 4, "outer_lr": 0.6, "outer_momentum": 0.4}, Snoo,
    ),
    WrapperPeer(
        "slowmo(adam)", "the paper's algorithm around torch.optim.Adam",
        {**_ADAM, "k": 4, "slow_lr": 0.7, "slow_momentum": 0.4}, SlowMo,
    ),
    WrapperPeer(
        "switch_ema(adam)", "the paper's algorithm around torch.optim.Adam", {**_ADAM, "k": 4, "ema_decay": 0.7},
        SwitchEMA,
    ),
    WrapperPeer(
        "radial_brake(adam)", "the formula of emerging-optimizers",
        {**_ADAM, "outward_scale": 0.4, "inward_scale": 0.8}, RadialBrake,
    ),
    WrapperPeer(
        "swa(adam)", "torch.optim.swa_utils.AveragedModel", {**_ADAM, "swa_start": 5, "swa_every": 3}, SWA, "average",
    ),
    WrapperPeer(
        "bema(adam)", "the paper's algorithm around torch.optim.Adam",
        {**_ADAM, "ema_power": 0.6, "bias_power": 0.4, "lag": 3, "multiplier": 0.7}, BEMA, "average",
    ),
    WrapperPeer(
        "clip_weights(adam)", "torch.clamp after torch.optim.Adam", {**_ADAM, "weight_bound": 0.6}, ClipWeights,
    ),
    WrapperPeer(
        "max_norm(adam)", "optax.projections.projection_l2_ball after torch.optim.Adam", {**_ADAM, "row_norm": 0.9},
        MaxNorm,
    ),
    WrapperPeer(
        "spectral_decay(adam)", "the paper's formula around torch.optim.Adam",
        {**_ADAM, "spectral_rate": 0.4, "ns_steps": 4}, SpectralDecay,
    ),
    WrapperPeer("nonnegative(adam)", "optax.keep_params_nonnegative", _ADAM, _nonnegative),
)  # fmt: skip
