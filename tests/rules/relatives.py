"""Rows of rules that change Adam or momentum in one place, and of rules for each element alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import optax
import pytorch_optimizer
import torch

from tests.rules.peer import Peer, adam_like, optax_peer, same, torch_peer
from tests.rules.runs import Hyper

_ADAM = {"lr": 0.03, "beta1": 0.8, "beta2": 0.95, "eps": 1e-6}
_ADAM_DECAY = {**_ADAM, "weight_decay": 0.07}
_BOUNDS = {**_ADAM_DECAY, "final_lr": 0.02, "base_lr": 0.03, "gamma": 0.2}


def _eps_beside_corrected(optimizer: Any) -> None:
    """pytorch_optimizer adds eps to the root of v, the papers to that of the corrected v: scale eps by the quotient."""
    bound, group = optimizer.apply_ams_bound, optimizer.param_groups[0]

    def denominator(eps: float, **moments: Any) -> Any:
        correction = math.sqrt(1 - group["betas"][1] ** group["step"])
        return bound(eps=eps * correction, exp_avg_sq_eps=0.0, **moments)

    optimizer.apply_ams_bound = denominator


def _coupled(h: Hyper) -> dict[str, Any]:
    return {**adam_like(h), "weight_decouple": False}


def _bounds(ams_bound: bool) -> Callable[[Hyper], dict[str, Any]]:
    return lambda h: {**_coupled(h), "final_lr": h["final_lr"], "gamma": h["gamma"], "ams_bound": ams_bound}


def _grokfast(h: Hyper) -> dict[str, Any]:
    keys = ("grokfast_alpha", "grokfast_lamb")
    return {**adam_like(h), **{key: h[key] for key in keys}, "normalize_lr": False}


_BESIDE = "pytorch_optimizer adds eps to sqrt(v) before its correction, and 1e-15 to v"
_CLAMP = "pytorch_optimizer holds the denominator at eps at least, where AdamW adds it: eps is too small to matter here"
_GROKFAST = {**_ADAM, "eps": 1e-30, "grokfast_alpha": 0.7, "grokfast_lamb": 1.5}

_TORCH: tuple[Peer, ...] = (
    torch_peer(
        "nadamw", torch.optim.NAdam,
        lambda h: {**adam_like(h), "momentum_decay": h["momentum_decay"], "decoupled_weight_decay": True},
        {**_ADAM_DECAY, "momentum_decay": 0.02}, "torch keeps mu_product in float32", rounds=True,
    ),
    torch_peer(
        "sparse_adam", torch.optim.SparseAdam,
        lambda h: {"lr": h["lr"], "betas": (h["beta1"], h["beta2"]), "eps": h["eps"]}, _ADAM,
    ),
    torch_peer("radamw", torch.optim.RAdam, lambda h: {**adam_like(h), "decoupled_weight_decay": True}, _ADAM_DECAY),
)  # fmt: skip

_MOMENTA: tuple[Peer, ...] = (
    torch_peer(
        "sgdw", pytorch_optimizer.SGDW, same("lr", "momentum", "dampening", "weight_decay"),
        {"lr": 0.05, "momentum": 0.8, "dampening": 0.3, "weight_decay": 0.1},
    ),
    torch_peer(
        "tiger", pytorch_optimizer.Tiger,
        lambda h: {"lr": h["lr"], "beta": h["momentum"], "weight_decay": h["weight_decay"]},
        {"lr": 0.01, "momentum": 0.8, "weight_decay": 0.3},
    ),
    torch_peer(
        "l2 >> qhm", pytorch_optimizer.QHM,
        lambda h: {"lr": h["lr"], "momentum": h["beta"], "nu": h["nu"], "weight_decay": h["weight_decay"]},
        {"lr": 0.05, "beta": 0.8, "nu": 0.6, "weight_decay": 0.1},
    ),
    torch_peer(
        "l2 >> pid", pytorch_optimizer.PID, same("lr", "momentum", "integral", "derivative", "weight_decay"),
        {"lr": 0.01, "momentum": 0.8, "integral": 3, "derivative": 7, "weight_decay": 0.1},
    ),
    torch_peer(
        "l2 >> aggmo", pytorch_optimizer.AggMo,
        lambda h: {
            "lr": h["lr"], "betas": (h["betas_0"], h["betas_1"], h["betas_2"]), "weight_decay": h["weight_decay"],
        },
        {"lr": 0.02, "betas_0": 0.3, "betas_1": 0.8, "betas_2": 0.95, "weight_decay": 0.1},
    ),
    torch_peer(
        "l2 >> accsgd", pytorch_optimizer.AccSGD,
        lambda h: {**same("lr", "kappa", "xi", "weight_decay")(h), "constant": h["c"]},
        {"lr": 0.01, "kappa": 10, "xi": 2, "c": 0.6, "weight_decay": 0.1},
    ),
    torch_peer(
        "pnm + decay", pytorch_optimizer.PNM,
        lambda h: {"lr": h["lr"], "betas": (h["beta1"], h["beta0"]), "weight_decay": h["weight_decay"]},
        {"lr": 0.03, "beta1": 0.8, "beta0": 0.7, "weight_decay": 0.07},
    ),
    torch_peer("msvag", pytorch_optimizer.MSVAG, same("lr", "beta"), {"lr": 0.03, "beta": 0.8}),
    torch_peer(
        "focus", pytorch_optimizer.FOCUS,
        lambda h: {
            "lr": h["lr"], "betas": (h["beta1"], h["beta2"]), "gamma": h["gamma"], "weight_decay": h["weight_decay"],
        },
        {"lr": 0.01, "beta1": 0.8, "beta2": 0.95, "gamma": 0.3, "weight_decay": 0.3},
        "without decay, pytorch_optimizer pulls at first by the rounding of the mean",
    ),
    torch_peer(
        "vsgd + decay", pytorch_optimizer.VSGD, same("lr", "ghattg", "ps", "tau1", "tau2", "eps", "weight_decay"),
        {"lr": 0.05, "ghattg": 7, "ps": 0.01, "tau1": 0.7, "tau2": 0.85, "eps": 1e-4, "weight_decay": 0.07},
    ),
    torch_peer(
        "ftrl", pytorch_optimizer.FTRL, same("lr", "beta", "lambda_1", "lambda_2"),
        {"lr": 0.3, "beta": 0.7, "lambda_1": 0.4, "lambda_2": 0.05},
    ),
    torch_peer(
        "kate + decay", pytorch_optimizer.Kate, lambda h: {**same("lr", "eps", "weight_decay")(h), "delta": h["eta"]},
        {"lr": 0.03, "eta": 0.3, "eps": 1e-4, "weight_decay": 0.07},
    ),
)  # fmt: skip

_ADAMS: tuple[Peer, ...] = (
    torch_peer(
        "l2 >> adabound", pytorch_optimizer.AdaBound, _bounds(False), _BOUNDS,
    ),
    torch_peer(
        "l2 >> amsbound", pytorch_optimizer.AdaBound, _bounds(True), _BOUNDS,
    ),
    torch_peer(
        "l2 >> adamod", pytorch_optimizer.AdaMod,
        lambda h: {**_coupled(h), "betas": (h["beta1"], h["beta2"], h["beta3"])}, {**_ADAM_DECAY, "beta3": 0.7},
    ),
    torch_peer(
        "diffgrad + decay", pytorch_optimizer.DiffGrad, adam_like, {**_ADAM_DECAY, "eps": 1e-3}, _BESIDE,
        prepare=_eps_beside_corrected,
    ),
    torch_peer(
        "adapnm + decay", pytorch_optimizer.AdaPNM,
        lambda h: {**adam_like(h), "betas": (h["beta1"], h["beta2"], h["beta0"])},
        {**_ADAM_DECAY, "eps": 1e-3, "beta0": 0.7}, _BESIDE, prepare=_eps_beside_corrected,
    ),
    torch_peer(
        "adamc", pytorch_optimizer.AdamC, lambda h: {**adam_like(h), "normalized": True},
        {**_ADAM_DECAY, "eps": 1e-3, "max_lr": 0.03}, _BESIDE, prepare=_eps_beside_corrected,
    ),
    torch_peer(
        "grokfast_adamw", pytorch_optimizer.GrokFastAdamW, _grokfast, {**_GROKFAST, "weight_decay": 0.07}, _CLAMP,
    ),
    torch_peer("transforms/grokfast >> adam", pytorch_optimizer.GrokFastAdamW, _grokfast, _GROKFAST, _CLAMP),
    torch_peer("ano + decay", pytorch_optimizer.Ano, adam_like, _ADAM_DECAY),
    torch_peer(
        "l2 >> adamg", pytorch_optimizer.AdamG,
        lambda h: {
            **adam_like(h), "betas": (h["beta1"], h["beta2"], h["beta3"]), "p": h["scale"], "q": h["q"],
        },
        {**_ADAM_DECAY, "lr": 0.3, "beta3": 0.7, "scale": 0.3, "q": 0.3},
    ),
    torch_peer("exadam + decay", pytorch_optimizer.EXAdam, adam_like, {**_ADAM_DECAY, "eps": 1e-3}),
)  # fmt: skip

_OPTAX: tuple[Peer, ...] = (
    optax_peer(
        "adamaxw", "optax.adamaxw",
        lambda h: optax.adamaxw(h["lr"], h["beta1"], h["beta2"], h["eps"], h["weight_decay"]), _ADAM_DECAY,
    ),
    optax_peer(
        "optimistic_gradient_descent", "optax.optimistic_gradient_descent",
        lambda h: optax.optimistic_gradient_descent(h["lr"], h["alpha"], h["beta"]),
        {"lr": 0.05, "alpha": 0.8, "beta": 0.3},
    ),
    optax_peer(
        "optimistic_adam", "optax.optimistic_adam_v2",
        lambda h: optax.optimistic_adam_v2(
            h["lr"], alpha=h["alpha"], beta=h["beta"], b1=h["beta1"], b2=h["beta2"], eps=h["eps"], nesterov=False,
        ),
        {**_ADAM, "alpha": 0.8, "beta": 0.3},
    ),
    optax_peer(
        "simplified_ademamix + decay", "optax.contrib.simplified_ademamix",
        lambda h: optax.contrib.simplified_ademamix(
            h["lr"], h["beta1"], h["beta2"], h["alpha"], h["eps"], weight_decay=h["weight_decay"],
        ),
        {**_ADAM_DECAY, "alpha": 3},
    ),
    optax_peer(
        "acprop + decay", "optax.contrib.acprop",
        lambda h: optax.contrib.acprop(h["lr"], h["beta1"], h["beta2"], h["eps"], h["eps"], h["weight_decay"]),
        {**_ADAM_DECAY, "eps": 1e-3}, "optax centers with the mean of the step before, the paper with the new one",
    ),
    optax_peer(
        "l2 >> cocob", "optax.contrib.cocob",
        lambda h: optax.contrib.cocob(h["lr"], h["alpha"], h["eps"], h["weight_decay"]),
        {"lr": 0.5, "alpha": 3, "eps": 1e-3, "weight_decay": 0.05},
    ),
)  # fmt: skip

RELATIVES: tuple[Peer, ...] = (*_TORCH, *_MOMENTA, *_ADAMS, *_OPTAX)
