"""The rules beside implementations that are not ours: who computes the same, and under which names.

Each `Peer` is one row: a rule of the library, the class or function that computes the same, and values far enough
from the defaults that a swapped name would show.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import optax
import pytorch_optimizer
import torch

from tests.rules.further import FURTHER
from tests.rules.kin import KIN
from tests.rules.listed import LISTED
from tests.rules.peer import Peer, adam_like, optax_peer, same, torch_peer
from tests.rules.relatives import RELATIVES
from tests.rules.runs import Hyper


def _rmsprop(h: Hyper) -> dict[str, Any]:
    keys = ("lr", "alpha", "eps", "weight_decay")
    return {**{k: h[k] for k in keys}, "momentum": h.get("momentum", 0)}


def _float64_weights(optimizer: Any) -> None:
    """pytorch_optimizer's QHAdam keeps its running weights in float32: start them in float64."""
    optimizer.init_group(optimizer.param_groups[0])
    for state in optimizer.state.values():
        state["beta1_weight"] = state["beta1_weight"].double()
        state["beta2_weight"] = state["beta2_weight"].double()


def _yogi_from_zero(optimizer: Any) -> None:
    """pytorch_optimizer's Yogi starts the mean, too, at the initial accumulator: start it at zero."""
    optimizer.init_group(optimizer.param_groups[0])
    for state in optimizer.state.values():
        state["exp_avg"].zero_()


def _optax_yogi_from_zero(state: Any) -> Any:
    """optax's Yogi starts the mean, too, at the initial accumulator: start it at zero."""
    return (state[0]._replace(mu=[jax.numpy.zeros_like(m) for m in state[0].mu]), *state[1:])


_ADAM = {"lr": 0.03, "beta1": 0.8, "beta2": 0.95, "eps": 1e-6}
_ADAM_DECAY = {**_ADAM, "weight_decay": 0.07}
_RMSPROP = {"lr": 0.02, "alpha": 0.9, "eps": 1e-6, "weight_decay": 0.05}
_SGD = {"lr": 0.05, "weight_decay": 0.1}

_TORCH: tuple[Peer, ...] = (
    torch_peer("l2 >> sgd", torch.optim.SGD, same("lr", "weight_decay"), _SGD),
    torch_peer(
        "l2 >> momentum", torch.optim.SGD, same("lr", "momentum", "dampening", "weight_decay"),
        {**_SGD, "momentum": 0.8, "dampening": 0.3},
    ),
    torch_peer(
        "l2 >> nesterov", torch.optim.SGD, same("lr", "momentum", "weight_decay", nesterov=True),
        {**_SGD, "momentum": 0.8},
    ),
    torch_peer(
        "l2 >> adagrad", torch.optim.Adagrad,
        lambda h: {
            "lr": h["lr"], "eps": h["eps"], "lr_decay": h["lr_decay"], "weight_decay": h["weight_decay"],
            "initial_accumulator_value": h["initial"],
        },
        {"lr": 0.05, "eps": 1e-6, "lr_decay": 0.02, "initial": 0.1, "weight_decay": 0.05},
    ),
    torch_peer(
        "l2 >> adadelta", torch.optim.Adadelta, same("lr", "rho", "eps", "weight_decay"),
        {"lr": 0.7, "rho": 0.85, "eps": 1e-5, "weight_decay": 0.05},
    ),
    torch_peer("l2 >> rmsprop", torch.optim.RMSprop, _rmsprop, _RMSPROP),
    torch_peer("l2 >> rmsprop_momentum", torch.optim.RMSprop, _rmsprop, {**_RMSPROP, "momentum": 0.8}),
    torch_peer(
        "l2 >> rmsprop_centered", torch.optim.RMSprop, lambda h: {**_rmsprop(h), "centered": True}, _RMSPROP,
        "torch gives NaN where rounding makes the variance negative; the rule holds it at zero",
    ),
    torch_peer(
        "l2 >> rmsprop_centered_momentum", torch.optim.RMSprop, lambda h: {**_rmsprop(h), "centered": True},
        {**_RMSPROP, "momentum": 0.8},
        "torch gives NaN where rounding makes the variance negative; the rule holds it at zero",
    ),
    torch_peer("l2 >> adam", torch.optim.Adam, adam_like, _ADAM_DECAY),
    torch_peer(
        "adam + decay", torch.optim.Adam, lambda h: {**adam_like(h), "decoupled_weight_decay": True}, _ADAM_DECAY,
    ),
    torch_peer("adamw", torch.optim.AdamW, adam_like, _ADAM_DECAY),
    torch_peer("l2 >> amsgrad", torch.optim.Adam, lambda h: {**adam_like(h), "amsgrad": True}, _ADAM_DECAY),
    torch_peer("amsgrad + decay", torch.optim.AdamW, lambda h: {**adam_like(h), "amsgrad": True}, _ADAM_DECAY),
    torch_peer("l2 >> adamax", torch.optim.Adamax, adam_like, _ADAM_DECAY),
    torch_peer(
        "l2 >> nadam", torch.optim.NAdam, lambda h: {**adam_like(h), "momentum_decay": h["momentum_decay"]},
        {**_ADAM_DECAY, "momentum_decay": 0.02}, "torch keeps mu_product in float32", rounds=True,
    ),
    torch_peer(
        "nadam + decay", torch.optim.NAdam,
        lambda h: {**adam_like(h), "momentum_decay": h["momentum_decay"], "decoupled_weight_decay": True},
        {**_ADAM_DECAY, "momentum_decay": 0.02}, "torch keeps mu_product in float32", rounds=True,
    ),
    torch_peer("l2 >> radam", torch.optim.RAdam, adam_like, _ADAM_DECAY),
    torch_peer(
        "radam + decay", torch.optim.RAdam, lambda h: {**adam_like(h), "decoupled_weight_decay": True}, _ADAM_DECAY,
    ),
    torch_peer(
        "rprop", torch.optim.Rprop,
        lambda h: {
            "lr": h["lr"], "etas": (h["eta_minus"], h["eta_plus"]), "step_sizes": (h["step_min"], h["step_max"]),
        },
        {"lr": 0.05, "eta_minus": 0.4, "eta_plus": 1.3, "step_min": 1e-3, "step_max": 0.09},
    ),
    torch_peer(
        "l2 >> asgd", torch.optim.ASGD, same("lr", "lambd", "alpha", "t0", "weight_decay"),
        {"lr": 0.05, "lambd": 0.01, "alpha": 0.6, "t0": 7, "weight_decay": 0.05},
        "torch keeps eta and mu in float32", rounds=True,
    ),
)  # fmt: skip

_PYTORCH_OPTIMIZER: tuple[Peer, ...] = (
    torch_peer(
        "lion", pytorch_optimizer.Lion,
        lambda h: {"lr": h["lr"], "betas": (h["beta1"], h["beta2"]), "weight_decay": h["weight_decay"]},
        {"lr": 0.01, "beta1": 0.8, "beta2": 0.95, "weight_decay": 0.3},
    ),
    torch_peer(
        "signum + decay", pytorch_optimizer.SignSGD, same("lr", "momentum", "weight_decay"),
        {"lr": 0.01, "momentum": 0.8, "weight_decay": 0.3},
    ),
    torch_peer("adabelief + decay", pytorch_optimizer.AdaBelief, adam_like, _ADAM_DECAY),
    torch_peer(
        "yogi + decay", pytorch_optimizer.Yogi, lambda h: {**adam_like(h), "initial_accumulator": h["initial"]},
        {**_ADAM_DECAY, "initial": 0.01}, "pytorch_optimizer and optax start the mean at 1e-6 instead of 0",
        prepare=_yogi_from_zero,
    ),
    torch_peer(
        "adan", pytorch_optimizer.Adan,
        lambda h: {
            "lr": h["lr"], "betas": (h["beta1"], h["beta2"], h["beta3"]), "eps": h["eps"],
            "weight_decay": h["weight_decay"],
        },
        {"lr": 0.03, "beta1": 0.9, "beta2": 0.8, "beta3": 0.95, "eps": 1e-6, "weight_decay": 0.07},
    ),
    torch_peer(
        "ademamix", pytorch_optimizer.AdEMAMix,
        lambda h: {
            "lr": h["lr"], "betas": (h["beta1"], h["beta2"], h["beta3"]), "eps": h["eps"], "alpha": h["alpha"],
            "weight_decay": h["weight_decay"], "weight_decouple": True, "t_alpha_beta3": h["alpha_warmup"],
        },
        {**_ADAM_DECAY, "beta3": 0.99, "alpha": 3, "alpha_warmup": 15, "beta3_warmup": 15},
    ),
    torch_peer(
        "l2 >> qhadam", pytorch_optimizer.QHAdam, lambda h: {**adam_like(h), "nus": (h["nu1"], h["nu2"])},
        {**_ADAM_DECAY, "nu1": 0.6, "nu2": 0.9}, "pytorch_optimizer keeps its weights in float32",
        widen=_float64_weights, rounds=True,
    ),
    torch_peer(
        "l2 >> madgrad", pytorch_optimizer.MADGRAD,
        lambda h: {
            "lr": h["lr"] - h["eps"], "momentum": h["momentum"], "eps": h["eps"], "weight_decay": h["weight_decay"],
        },
        {"lr": 0.03, "momentum": 0.8, "eps": 1e-6, "weight_decay": 0.05},
        "pytorch_optimizer adds eps to lr, as the authors' code does and the paper does not: it is given lr - eps",
    ),
)  # fmt: skip


def _laprop(h: Hyper) -> Any:
    """LaProp of optax's parts: its own class would sum lr times the momentum, as the paper does not."""
    return optax.chain(
        optax.scale_by_rms(h["beta2"], h["eps"], eps_in_sqrt=False, bias_correction=True),
        optax.ema(h["beta1"]),
        optax.add_decayed_weights(h["weight_decay"]),
        optax.scale_by_learning_rate(h["lr"]),
    )


def _optax_adam_like(function: Callable[..., Any]) -> Callable[[Hyper], Any]:
    return lambda h: function(
        h["lr"], b1=h["beta1"], b2=h["beta2"],
        **{key: h[key] for key in ("eps", "weight_decay") if key in h},
    )  # fmt: skip


def _optax_rmsprop(centered: bool) -> Callable[[Hyper], Any]:
    return lambda h: optax.rmsprop(h["lr"], h["alpha"], h["eps"], eps_in_sqrt=False, centered=centered)


_RMSPROP_ALONE = {"lr": 0.02, "alpha": 0.9, "eps": 1e-6}

_OPTAX: tuple[Peer, ...] = (
    optax_peer("sgd", "optax.sgd", lambda h: optax.sgd(h["lr"]), {"lr": 0.05}),
    optax_peer("momentum", "optax.sgd", lambda h: optax.sgd(h["lr"], h["momentum"]), {"lr": 0.05, "momentum": 0.8}),
    optax_peer(
        "nesterov", "optax.sgd", lambda h: optax.sgd(h["lr"], h["momentum"], nesterov=True),
        {"lr": 0.05, "momentum": 0.8},
    ),
    optax_peer(
        "l2 >> adadelta", "optax.adadelta", lambda h: optax.adadelta(h["lr"], h["rho"], h["eps"], h["weight_decay"]),
        {"lr": 0.7, "rho": 0.85, "eps": 1e-5, "weight_decay": 0.05},
    ),
    optax_peer("rmsprop", "optax.rmsprop", _optax_rmsprop(centered=False), _RMSPROP_ALONE),
    optax_peer("rmsprop_centered", "optax.rmsprop", _optax_rmsprop(centered=True), _RMSPROP_ALONE),
    optax_peer("adam", "optax.adam", _optax_adam_like(optax.adam), _ADAM),
    optax_peer("adamw", "optax.adamw", _optax_adam_like(optax.adamw), _ADAM_DECAY),
    optax_peer("adamax", "optax.adamax", _optax_adam_like(optax.adamax), _ADAM),
    optax_peer(
        "lion", "optax.lion", _optax_adam_like(optax.lion),
        {"lr": 0.01, "beta1": 0.8, "beta2": 0.95, "weight_decay": 0.3},
    ),
    optax_peer("signum", "optax.signum", lambda h: optax.signum(h["lr"], h["momentum"]), {"lr": 0.01, "momentum": 0.8}),
    optax_peer(
        "adabelief", "optax.adabelief",
        lambda h: optax.adabelief(h["lr"], b1=h["beta1"], b2=h["beta2"], eps=h["eps"], eps_root=h["eps"]), _ADAM,
    ),
    optax_peer(
        "yogi", "optax.yogi", _optax_adam_like(optax.yogi), _ADAM,
        note="pytorch_optimizer and optax start the mean at 1e-6 instead of 0", prepare=_optax_yogi_from_zero,
    ),
    optax_peer(
        "ademamix", "optax.contrib.ademamix",
        lambda h: optax.contrib.ademamix(
            h["lr"], h["beta1"], h["beta2"], h["beta3"], h["alpha"], h["eps"], weight_decay=h["weight_decay"],
        ),
        {**_ADAM_DECAY, "beta3": 0.99, "alpha": 3},
    ),
    optax_peer(
        "laprop + decay", "optax.chain(scale_by_rms, ema)", _laprop,
        {"lr": 0.03, "beta1": 0.8, "beta2": 0.95, "eps": 1e-4, "weight_decay": 0.07},
        "the authors' code, and pytorch_optimizer, sum lr times the momentum, which differs where lr changes",
    ),
    optax_peer("adopt", "optax.contrib.adopt", _optax_adam_like(optax.contrib.adopt), {**_ADAM, "eps": 1e-3}),
    optax_peer(
        "transforms/clip_by_value >> sgd", "optax.chain(clip, sgd)",
        lambda h: optax.chain(optax.clip(h["bound"]), optax.sgd(h["lr"])), {"lr": 0.05, "bound": 0.7},
    ),
    optax_peer(
        "transforms/scale >> adam", "optax.chain(scale, adam)",
        lambda h: optax.chain(optax.scale(h["factor"]), _optax_adam_like(optax.adam)(h)), {**_ADAM, "factor": 3},
    ),
    optax_peer("transforms/identity >> adam", "optax.chain(identity, adam)",
               lambda h: optax.chain(optax.identity(), _optax_adam_like(optax.adam)(h)), _ADAM),
    optax_peer("transforms/sign >> sgd", "optax.sign_sgd", lambda h: optax.sign_sgd(h["lr"]), {"lr": 0.05}),
    optax_peer(
        "transforms/nesterov + decay", "optax.chain(trace, add_decayed_weights)",
        lambda h: optax.chain(
            optax.trace(h["momentum"], nesterov=True),
            optax.add_decayed_weights(h["weight_decay"]),
            optax.scale_by_learning_rate(h["lr"]),
        ),
        {**_SGD, "momentum": 0.8},
    ),
)  # fmt: skip

PEERS: tuple[Peer, ...] = (*_TORCH, *_PYTORCH_OPTIMIZER, *_OPTAX, *RELATIVES, *LISTED, *KIN, *FURTHER)

#: One row for each rule.
FIRST: tuple[Peer, ...] = tuple(
    peer for i, peer in enumerate(PEERS) if peer.rule not in {other.rule for other in PEERS[:i]}
)
