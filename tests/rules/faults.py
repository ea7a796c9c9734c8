"""Where code elsewhere computes something else than the paper it names, or its authors' code: a row for each.

A row's peer is their code as it is shipped. The rule it is compared with has a row of its own in the tables of peers,
where their code is put right, or where somebody else computes the same.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import optax
import pytorch_optimizer
import torch

from tests.rules.peer import Peer, adam_like, optax_peer, same, torch_peer
from tests.rules.runs import Array, Hyper, Run, TorchRun


@dataclass(frozen=True)
class Fault:
    """Their code as shipped beside our rule; what it does, and what it should do by whom."""

    peer: Peer
    does: str
    instead: str


@dataclass(frozen=True)
class CodeFault:
    """Code elsewhere beside code here that is no rule; a function in `test` shows that they are apart."""

    theirs: str
    does: str
    instead: str
    here: str
    test: str


_ADAM = {"lr": 0.03, "beta1": 0.8, "beta2": 0.95, "eps": 1e-3}
_DECAYED = {**_ADAM, "weight_decay": 0.07}
_EARLY = "adds eps to the root of the second moment before it corrects its bias"
_LATE = "add it after the correction, as in the paper"
_WIDE = "use the dtype of its parameters"


def _asgd(params: Sequence[Array], hyper: Hyper, *, shipped: bool = False) -> Run:
    """pytorch_optimizer's ASGD with the numbers of the paper's algorithm."""
    kind = functools.partial(pytorch_optimizer.ASGD, lr=hyper["lr0"], amplifier=1, dampening=2, eps=0, theta=0)
    return TorchRun(kind, lambda _: {}, params, hyper, shipped=True)


def _adan(h: Hyper) -> Any:
    return optax.adan(h["lr"], h["beta1"], h["beta2"], h["beta3"], h["eps"], eps_root=0.0)


def _rprop(h: Hyper) -> Any:
    return optax.rprop(h["lr"], h["eta_minus"], h["eta_plus"], h["step_min"], h["step_max"])


def _lars(h: Hyper) -> Any:
    return optax.lars(
        h["lr"], h["weight_decay"], trust_coefficient=h["trust_coefficient"], momentum=h["momentum"],
    )  # fmt: skip


def _warmed_up(h: Hyper) -> Any:
    return optax.contrib.schedule_free_adamw(
        h["lr"], 7, h["beta1"], h["beta2"], h["eps"], h["weight_decay"], h["weight_lr_power"],
    )  # fmt: skip


_TORCH = (
    Fault(
        torch_peer(
            "nadam", torch.optim.NAdam, lambda h: {**adam_like(h), "momentum_decay": h["momentum_decay"]},
            {**_ADAM, "momentum_decay": 0.02},
        ),
        "keeps the product of its momenta in float32, for parameters in float64 too", _WIDE,
    ),
    Fault(
        torch_peer(
            "asgd", torch.optim.ASGD, same("lr", "lambd", "alpha", "t0"),
            {"lr": 0.05, "lambd": 0.01, "alpha": 0.6, "t0": 7},
        ),
        "keeps its step and the weight of its average in float32, for parameters in float64 too", _WIDE,
    ),
)  # fmt: skip

_OPTAX = (
    Fault(
        optax_peer(
            "lars", "optax.lars", _lars, {"lr": 0.5, "momentum": 0.8, "trust_coefficient": 0.02, "weight_decay": 0.3},
        ),
        "divides by the norm of the sum of gradient and decay", "divide by the sum of their norms, as in the paper",
    ),
    Fault(
        optax_peer("adan", "optax.adan", _adan, {**_ADAM, "beta3": 0.9, "weight_decay": 0}),
        "gives differences of gradients the weight 1 - b2, which is 0.08 by default",
        "give them the weight b2, which is one minus the paper's beta2, as in the authors' code",
    ),
    Fault(
        optax_peer(
            "rprop", "optax.rprop", _rprop,
            {"lr": 0.05, "eta_minus": 0.4, "eta_plus": 1.3, "step_min": 1e-3, "step_max": 0.09},
        ),
        "moves by the step of the gradient before", "move by the step of this gradient, as in the paper and in torch",
    ),
    Fault(
        optax_peer("yogi", "optax.yogi", lambda h: optax.yogi(h["lr"], h["beta1"], h["beta2"], h["eps"]), _ADAM),
        "begins the mean of gradients, too, at the initial value of the second moment",
        "begin it at zero, as in the paper",
    ),
    Fault(
        optax_peer(
            "schedule_free_adamw", "optax.contrib.schedule_free_adamw", _warmed_up,
            {**_DECAYED, "warmup_steps": 7, "weight_lr_power": 1.5},
        ),
        "begins a warm-up with a step of length zero", "begin with a share of the full step, as in the authors' code",
    ),
    Fault(
        optax_peer(
            "madgrad", "optax.contrib.madgrad",
            lambda h: optax.contrib.madgrad(h["lr"], momentum=h["momentum"], eps=h["eps"]),
            {"lr": 0.03, "momentum": 0.8, "eps": 1e-4},
        ),
        "adds eps to the learning rate, as the authors' code does", "use the learning rate alone, as in the paper",
    ),
)  # fmt: skip

_PYTORCH_OPTIMIZER = (
    Fault(
        torch_peer(
            "transforms/centralize >> lookahead(radam)", pytorch_optimizer.Ranger, adam_like,
            {**_ADAM, "k": 6, "alpha": 0.5},
        ),
        "climbs the gradient while the variance is unknown, unless `degenerated_to_sgd` is set",
        "descend, as in the authors' code",
    ),
    Fault(
        torch_peer(
            "bcos + decay", pytorch_optimizer.BCOS,
            lambda h: {**same("lr", "beta", "eps", "weight_decay")(h), "simple_cond": True},
            {"lr": 0.03, "beta": 0.8, "eps": 1e-3, "weight_decay": 0.07},
        ),
        "estimates from the momentum of this step, which it has overwritten",
        "estimate from the momentum of the step before, as in the authors' code",
    ),
    Fault(
        torch_peer(
            "dadapt_adan", pytorch_optimizer.DAdaptAdan,
            lambda h: {
                "lr": h["lr"], "betas": (h["beta1"], h["beta2"], h["beta3"]), "eps": h["eps"], "d0": h["d0"],
            },
            {"lr": 0.7, "beta1": 0.9, "beta2": 0.8, "beta3": 0.95, "eps": 1e-3, "d0": 0.01},
        ),
        "sums the fourth power where Adan sums the square", "sum the square, as in the authors' code",
    ),
    Fault(
        torch_peer(
            "adoptw", pytorch_optimizer.ADOPT, lambda h: {**adam_like(h), "weight_decouple": True}, _DECAYED,
        ),
        "bounds the gradient by the count of this step",
        "bound it by the count of the step before, as in the authors' code",
    ),
    Fault(
        torch_peer(
            "padam", pytorch_optimizer.PAdam, lambda h: {**adam_like(h), "partial": h["partial"]},
            {**_ADAM, "partial": 0.2},
        ),
        "leaves out the maximum of second moments", "take the maximum, as in the paper and the authors' code",
    ),
    Fault(
        replace(
            torch_peer("adgd", pytorch_optimizer.ASGD, same(), {"lr0": 0.01}), start=_asgd,
        ),
        "compares norms of parameters and of gradients", "compare the norms of their changes, as in the paper",
    ),
    Fault(
        torch_peer(
            "swats", pytorch_optimizer.SWATS, adam_like, {**_ADAM, "eps": 0.3, "tolerance": 0.3},
        ),
        "switches all tensors when one of them settles, to the step of the last one",
        "switch when all tensors together settle, as in the paper",
    ),
    Fault(
        torch_peer(
            "yogi + decay", pytorch_optimizer.Yogi, lambda h: {**adam_like(h), "initial_accumulator": h["initial"]},
            {**_DECAYED, "initial": 0.01},
        ),
        "begins the mean of gradients, too, at the initial value of the second moment",
        "begin it at zero, as in the paper",
    ),
    Fault(torch_peer("diffgrad + decay", pytorch_optimizer.DiffGrad, adam_like, _DECAYED), _EARLY, _LATE),
    Fault(
        torch_peer(
            "adapnm + decay", pytorch_optimizer.AdaPNM,
            lambda h: {**adam_like(h), "betas": (h["beta1"], h["beta2"], h["beta0"])}, {**_DECAYED, "beta0": 0.7},
        ),
        _EARLY, _LATE,
    ),
    Fault(
        torch_peer(
            "adamc", pytorch_optimizer.AdamC, lambda h: {**adam_like(h), "normalized": True},
            {**_DECAYED, "max_lr": 0.03},
        ),
        _EARLY, _LATE,
    ),
    Fault(
        torch_peer(
            "adanorm + decay", pytorch_optimizer.AdaNorm, lambda h: {**adam_like(h), "r": h["gamma"]},
            {**_DECAYED, "gamma": 0.8},
        ),
        _EARLY, _LATE,
    ),
    Fault(
        torch_peer(
            "mars_adamw", pytorch_optimizer.MARS,
            lambda h: {**adam_like(h), "gamma": h["gamma"], "optimize_1d": True}, {**_DECAYED, "gamma": 0.1},
        ),
        _EARLY, "add it after the correction, as in the authors' code",
    ),
    Fault(
        torch_peer(
            "l2 >> aida", pytorch_optimizer.Aida, lambda h: {**adam_like(h), "xi": h["xi"]}, {**_DECAYED, "xi": 1e-3},
        ),
        _EARLY, "add it after the correction, as in the authors' code",
    ),
    Fault(
        torch_peer(
            "grokfast_adamw", pytorch_optimizer.GrokFastAdamW,
            lambda h: {
                **adam_like(h), "grokfast_alpha": h["grokfast_alpha"], "grokfast_lamb": h["grokfast_lamb"],
                "normalize_lr": False,
            },
            {**_DECAYED, "grokfast_alpha": 0.7, "grokfast_lamb": 1.5},
        ),
        "holds its denominator at eps at least", "add eps to it, as AdamW does",
    ),
    Fault(
        torch_peer(
            "cautious_lion", pytorch_optimizer.Lion,
            lambda h: {
                "lr": h["lr"], "betas": (h["beta1"], h["beta2"]), "weight_decay": h["weight_decay"], "cautious": True,
            },
            {"lr": 0.01, "beta1": 0.8, "beta2": 0.95, "weight_decay": 0.3},
        ),
        "scales the kept elements by numel/(kept + 1), as in the paper", "scale by numel/kept, as in the authors' code",
    ),
    Fault(
        torch_peer("l2 >> madgrad", pytorch_optimizer.MADGRAD, same("lr", "momentum", "eps", "weight_decay"),
            {"lr": 0.03, "momentum": 0.8, "eps": 1e-6, "weight_decay": 0.05},
        ),
        "adds eps to the learning rate, as the authors' code does", "use the learning rate alone, as in the paper",
    ),
    Fault(
        torch_peer("laprop + decay", pytorch_optimizer.LaProp, adam_like, {**_DECAYED, "eps": 1e-4}),
        "sums the momentum times the learning rate of each step, as the authors' code does",
        "sum the momentum alone, as in the paper",
    ),
    Fault(
        torch_peer(
            "l2 >> qhadam", pytorch_optimizer.QHAdam, lambda h: {**adam_like(h), "nus": (h["nu1"], h["nu2"])},
            {**_DECAYED, "nu1": 0.6, "nu2": 0.9},
        ),
        "keeps the weights of its means in float32, for parameters in float64 too", _WIDE,
    ),
    Fault(
        torch_peer(
            "dadapt_sgd", pytorch_optimizer.DAdaptSGD, same("lr", "momentum", "d0"),
            {"lr": 0.7, "momentum": 0.8, "d0": 0.01},
        ),
        "takes norms in float32, for parameters in float64 too", _WIDE,
    ),
    Fault(
        torch_peer(
            "adagc", pytorch_optimizer.AdaGC,
            lambda h: {
                **adam_like(h), **same("beta", "lambda_abs", "lambda_rel")(h), "warmup_steps": h["warmup"],
            },
            {**_DECAYED, "beta": 0.7, "lambda_abs": 3, "lambda_rel": 1.3, "warmup": 6},
        ),
        "takes the norm of the model in float32, for parameters in float64 too", _WIDE,
    ),
    Fault(
        torch_peer(
            "adamp", pytorch_optimizer.AdamP, lambda h: {**adam_like(h), **same("delta", "wd_ratio")(h)},
            {**_DECAYED, "delta": 0.1, "wd_ratio": 0.1},
        ),
        _EARLY, "add it after the correction, as in the authors' code",
    ),
    Fault(
        torch_peer(
            "schedule_free_adamw", pytorch_optimizer.ScheduleFreeAdamW,
            lambda h: {**adam_like(h), **same("r", "weight_lr_power", "warmup_steps")(h)},
            {**_DECAYED, "eps": 1e-6, "r": 0.5, "weight_lr_power": 1.5, "warmup_steps": 7},
        ),
        "adds 1e-15 to the second moment", "leave the second moment as it is, as in the authors' code",
    ),
)  # fmt: skip

FAULTS: tuple[Fault, ...] = (*_TORCH, *_OPTAX, *_PYTORCH_OPTIMIZER)

CODE_FAULTS = (
    CodeFault(
        "torch.optim.LBFGS",
        "moves to NaN, or fails, if `strong_wolfe` tries a step to a loss that is not finite",
        "try a shorter step", "rulec.torch.LBFGS", "tests/torch/test_lbfgs.py:test_torch_goes_through_a_wall",
    ),
    CodeFault(
        "optax.polyak_sgd", "divides by the norm of the gradient times `scaling`",
        "divide by the norm of the gradient itself, as in its documentation", "polyak_sgd",
        "tests/rules/test_inputs.py:test_optax_s_polyak_step_has_the_norm_of_the_scaled_gradient",
    ),
    CodeFault(
        "optax.contrib.sophia", "uses the diagonal of the step before, and none in the first step",
        "use the diagonal of this step, as in the paper",
        "sophia", "tests/rules/test_inputs.py:test_optax_s_sophia_steps_with_the_diagonal_of_the_step_before",
    ),
    CodeFault(
        "pytorch_optimizer.BSAM",
        "leaves the weights at the point they climbed to, and multiplies the gradient by the weight decay",
        "move the weights back, and add the decayed weights, as in the authors' code", "bsam",
        "tests/rules/test_passes.py:test_bsam_of_pytorch_optimizer_climbs",
    ),
)  # fmt: skip
