"""Rows of the relatives of well-known rules that timm, HeavyBall, Keras and papers name.

`KIN` are rules for each element alone, `KIN_REDUCING` those that reduce.
"""

from __future__ import annotations

from typing import Any

import optax
import pytorch_optimizer
import torch

from tests.rules.peer import Peer, adam_like, optax_peer, printed_peer, same, torch_peer
from tests.rules.printed_kin import (
    AdaGradNorm,
    AdaLomo,
    AdamAtan2,
    AdamD,
    AdaMomentum,
    AdaX,
    FtrlProximal,
    HyperballAdam,
    LambC,
    MsamLaProp,
    SignLaProp,
    UnscaledAdamW,
)
from tests.rules.runs import Hyper

_ADAM = {"lr": 0.03, "beta1": 0.8, "beta2": 0.95, "eps": 1e-6}
_ADAM_DECAY = {**_ADAM, "weight_decay": 0.07}


def _bound_a_step_earlier(optimizer: Any) -> None:
    """pytorch_optimizer's ADOPT bounds by the count of this step, the authors' code by the one before: by that now."""
    optimizer.clip_lambda = lambda step: (step - 1) ** 0.25


def _rmsprop_tf(h: Hyper) -> Any:
    return optax.rmsprop(h["lr"], h["alpha"], h["eps"], initial_scale=1.0, momentum=h["momentum"])


KIN: tuple[Peer, ...] = (
    torch_peer("amsgradw", torch.optim.AdamW, lambda h: {**adam_like(h), "amsgrad": True}, _ADAM_DECAY),
    torch_peer(
        "radabelief + decay", pytorch_optimizer.AdaBelief, lambda h: {**adam_like(h), "rectify": True}, _ADAM_DECAY,
    ),
    torch_peer(
        "adoptw", pytorch_optimizer.ADOPT, lambda h: {**adam_like(h), "weight_decouple": True},
        {**_ADAM_DECAY, "eps": 1e-3},
        "pytorch_optimizer's bound is a step ahead of the authors' code: it is put back", prepare=_bound_a_step_earlier,
    ),
    torch_peer(
        "madgradw", pytorch_optimizer.MADGRAD,
        lambda h: {
            "lr": h["lr"] - h["eps"], "momentum": h["momentum"], "eps": h["eps"], "weight_decouple": True,
            "weight_decay": h["weight_decay"],
        },
        {"lr": 0.03, "momentum": 0.8, "eps": 1e-6, "weight_decay": 0.05},
        "pytorch_optimizer adds eps to lr, as the authors' code does and the paper does not: it is given lr - eps",
    ),
    optax_peer(
        "rmsprop_tf", "optax.rmsprop", _rmsprop_tf, {"lr": 0.02, "alpha": 0.8, "momentum": 0.7, "eps": 1e-4},
    ),
    printed_peer(
        "ftrl_proximal", "TensorFlow's documentation", FtrlProximal,
        {
            "lr": 0.3, "lr_power": -0.4, "initial": 0.2, "lambda1": 0.3, "lambda2": 0.05, "shrinkage": 0.01,
            "beta": 0.7,
        },
    ),
    printed_peer("unscaled_adamw", "HeavyBall's formula", UnscaledAdamW, {**_ADAM_DECAY, "eps": 1e-3}),
    printed_peer("adamd", "the paper's algorithm", AdamD, _ADAM),
    printed_peer(
        "adam_atan2", "the paper's formula", AdamAtan2, {"lr": 0.03, "beta1": 0.8, "beta2": 0.95, "a": 1.27, "b": 0.9},
    ),
    printed_peer("adax", "the paper's algorithm", AdaX, {"lr": 0.03, "beta1": 0.8, "beta2": 0.05, "eps": 1e-6}),
    printed_peer("adamomentum", "the paper's algorithm", AdaMomentum, _ADAM),
)  # fmt: skip

KIN_REDUCING: tuple[Peer, ...] = (
    torch_peer(
        "schedule_free_radam", pytorch_optimizer.ScheduleFreeRAdam,
        lambda h: {**adam_like(h), **same("r", "weight_lr_power")(h)},
        {**_ADAM_DECAY, "weight_lr_power": 1.5, "r": 0.5},
    ),
    printed_peer("sign_laprop", "HeavyBall's formula", SignLaProp, {**_ADAM, "eps": 1e-4}),
    printed_peer("lambc", "LAMB's algorithm, with the ratio bounded", LambC, _ADAM_DECAY),
    printed_peer(
        "msam_laprop", "HeavyBall's formula", MsamLaProp, {**_ADAM_DECAY, "eps": 1e-3, "rho": 0.02},
    ),
    printed_peer("hyperball_adam", "HeavyBall's formula around Adam", HyperballAdam, _ADAM_DECAY),
    printed_peer("adalomo", "the paper's algorithm", AdaLomo, {
        "lr": 0.05, "decay": 0.7, "eps1": 1e-6, "eps2": 0.01, "d": 0.7, "weight_decay": 0.07,
    }),
    printed_peer("adagrad_norm", "the paper's algorithm", AdaGradNorm, {"lr": 0.7, "b0": 0.3}),
)  # fmt: skip
