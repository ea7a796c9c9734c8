"""The rules that reduce, beside implementations that are not ours.

Rows are those of `tests.rules.peers`. Where no implementation can be relied on that a test may install, the other side
is the algorithm as it is printed, in NumPy and in the order of the page: the classes of `tests.rules.printed`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import optax
import pytorch_optimizer
import torch
from torch.nn.utils import clip_grad_norm_

from tests.rules.caution import CAUTIOUS
from tests.rules.further import FURTHER_REDUCING
from tests.rules.kin import KIN_REDUCING
from tests.rules.listed import LISTED_REDUCING, squares
from tests.rules.peer import Peer, adam_like, optax_peer, printed_peer, same, torch_peer
from tests.rules.printed import CautiousAdamW, CautiouslyDecayed, Larc, Lars, NoisySGD, SignDecay
from tests.rules.printed_layers import LAYERED
from tests.rules.runs import Hyper
from tests.rules.sides import flattened, inside, nothing_under_the_root, patched


def _clipped(clip: Callable[[list[torch.Tensor]], Any]) -> Callable[[Any], None]:
    """Has `clip` called with the parameters before every step of an optimizer."""

    def hook(optimizer: Any, *_: Any) -> None:
        clip(optimizer.param_groups[0]["params"])

    return lambda optimizer: optimizer.register_step_pre_hook(hook)


def _late_eps(optimizer: Any) -> None:
    """pytorch_optimizer's Aida adds 1e-15 under the root, and eps before it corrects the bias: it does neither now."""

    def bound(*, exp_avg_sq: torch.Tensor, eps: float, **_: Any) -> torch.Tensor:
        group = optimizer.param_groups[0]
        return exp_avg_sq.sqrt() + eps * math.sqrt(1 - group["betas"][1] ** group["step"])

    optimizer.apply_ams_bound = bound


def _rows_as_subsets(optimizer: Any) -> None:
    """Makes every tensor a group of AdamWSN's, and for matrices the rows its subsets; all follow the first group."""
    (group,) = optimizer.param_groups
    options = {key: value for key, value in group.items() if key != "params"}
    rows = [{"sn": p.ndim > 1, "subset_size": p.shape[-1] if p.ndim > 1 else 1} for p in group["params"]]
    optimizer.param_groups[:] = [
        {**options, **row, "params": [p]} for p, row in zip(group["params"], rows, strict=True)
    ]
    first, *others = optimizer.param_groups

    def follow(*_: Any) -> None:
        for other in others:
            other.update({key: first[key] for key in ("lr", "betas", "eps", "weight_decay")})

    optimizer.register_step_pre_hook(follow)


def _orthograd(tensors: Sequence[torch.Tensor], foreach: bool, **keywords: Any) -> Any:
    return pytorch_optimizer.OrthoGrad(torch.optim.SGD(tensors, foreach=foreach, **keywords), foreach=foreach)


def _unit_clip(h: Hyper) -> Any:
    """optax's adaptive clipping of all but the first dimension, as torch stores weights."""
    kinds = {
        str(n): optax.adaptive_grad_clip(h["clipping"], h["min_norm"], tuple(range(1, n)) or None) for n in range(5)
    }
    return optax.chain(
        optax.partition(kinds, lambda params: [str(p.ndim) for p in params]), optax.scale_by_learning_rate(h["lr"])
    )


def finite_adam(h: Hyper) -> Any:
    """optax's Adam that leaves out steps with bad gradients."""
    return optax.apply_if_finite(optax.adam(h["lr"], h["beta1"], h["beta2"], h["eps"]), 1000)


def _skipping_adam(h: Hyper) -> Any:
    """optax's Adam that leaves out steps with large gradients."""
    skips = functools.partial(optax.skip_large_updates, max_squared_norm=h["max_squared_norm"])
    adam = optax.adam(h["lr"], h["beta1"], h["beta2"], h["eps"])
    return optax.MultiSteps(adam, 1, should_skip_update_fn=skips).gradient_transformation()


def _before_sgd(*parts: Any) -> Callable[[Hyper], Any]:
    """Parts of optax that take hyper-parameters, one after the other, and gradient descent."""
    return lambda h: optax.chain(*(part(h) for part in parts), optax.scale_by_learning_rate(h["lr"]))


def _b1_b2(h: Hyper) -> dict[str, float]:
    return {"b1": h["beta1"], "b2": h["beta2"], "eps": h["eps"], "weight_decay": h["weight_decay"]}


def _mars(h: Hyper) -> dict[str, Any]:
    return {**adam_like(h), "gamma": h["gamma"], "optimize_1d": True}


def _projecting(h: Hyper) -> dict[str, Any]:
    return {"delta": h["delta"], "wd_ratio": h["wd_ratio"], "eps": h["eps"], "weight_decay": h["weight_decay"]}


def _adamp(h: Hyper) -> dict[str, Any]:
    return {**adam_like(h), **_projecting(h)}


def _schedule_free(h: Hyper) -> dict[str, Any]:
    return {key: h[key] for key in ("lr", "weight_decay", "warmup_steps", "r", "weight_lr_power")}


_ADAM = {"lr": 0.03, "beta1": 0.8, "beta2": 0.95, "eps": 1e-6}
_ADAM_DECAY = {**_ADAM, "weight_decay": 0.07}
_TINY = {"eps": 1e-30}
_PROJECTION = {"lr": 0.02, "eps": 1e-8, "weight_decay": 0.05, "delta": 0.9, "wd_ratio": 0.3}
_AVERAGED = {"lr": 0.05, "weight_decay": 0.07, "weight_lr_power": 1.5}
_LARS = {"lr": 0.5, "momentum": 0.8, "trust_coefficient": 0.02}
_MAX_NORM, _MAX_GLOBAL_NORM = 4.0, 20.0

_EPS_EARLY = "pytorch_optimizer, unlike the authors' code, adds eps before it corrects the bias: eps is tiny here"
_ROOT = "pytorch_optimizer adds 1e-15 to the second moment: it is taken out"

_LAYERWISE: tuple[Peer, ...] = (
    optax_peer("lamb", "optax.lamb", lambda h: optax.lamb(h["lr"], **_b1_b2(h)), _ADAM_DECAY),
    optax_peer(
        "lars", "optax.lars",
        lambda h: optax.lars(h["lr"], 0, trust_coefficient=h["trust_coefficient"], momentum=h["momentum"]),
        {**_LARS, "weight_decay": 0}, "without decay, where optax takes the norm of the sum",
    ),
    printed_peer("lars", "the paper's algorithm 1", Lars, {**_LARS, "weight_decay": 0.3}),
    printed_peer(
        "larc", "NVIDIA's formula", Larc,
        {"lr": 0.05, "momentum": 0.8, "weight_decay": 0.3, "trust_coefficient": 0.1, "eps": 1e-8},
    ),
    printed_peer(
        "larc(nesterov=1)", "NVIDIA's formula, with Nesterov's momentum", Larc,
        {"lr": 0.05, "momentum": 0.8, "weight_decay": 0.3, "trust_coefficient": 0.1, "eps": 1e-8, "nesterov": 1},
    ),
    optax_peer("novograd", "optax.novograd", lambda h: optax.novograd(h["lr"], **_b1_b2(h)), _ADAM_DECAY),
    torch_peer("novograd", pytorch_optimizer.NovoGrad, adam_like, _ADAM_DECAY),
    torch_peer(
        "stable_adamw", pytorch_optimizer.StableAdamW, lambda h: {**adam_like(h), "kahan_sum": False}, _ADAM_DECAY,
    ),
    torch_peer(
        "l2 >> adai", pytorch_optimizer.Adai,
        lambda h: {
            "lr": h["lr"], "betas": (h["beta0"], h["beta2"]), "eps": h["eps"], "weight_decay": h["weight_decay"],
        },
        {"lr": 0.05, "beta0": 0.3, "beta2": 0.95, "eps": 0.01, "weight_decay": 0.05},
        "pytorch_optimizer also holds the mean to at least eps",
    ),
    torch_peer("adamp", pytorch_optimizer.AdamP, _adamp, {**_ADAM, **_PROJECTION, **_TINY}, _EPS_EARLY),
    torch_peer(
        "adam >> transforms/projection", pytorch_optimizer.AdamP, _adamp,
        {**_ADAM, **_PROJECTION, **_TINY, "tiny": 1e-30}, _EPS_EARLY,
    ),
    torch_peer(
        "sgdp", pytorch_optimizer.SGDP,
        lambda h: {**_projecting(h), "lr": h["lr"], "momentum": h["momentum"]}, {**_PROJECTION, "momentum": 0.8},
    ),
    optax_peer("fromage", "optax.fromage", lambda h: optax.fromage(h["lr"], 0), {"lr": 0.05}),
    torch_peer("fromage", pytorch_optimizer.Fromage, same("lr"), {"lr": 0.05}),
    torch_peer(
        "mars_adamw", pytorch_optimizer.MARS, _mars, {**_ADAM_DECAY, **_TINY, "gamma": 0.1},
        f"{_EPS_EARLY}; {_ROOT}", prepare=nothing_under_the_root,
    ),
    torch_peer("grams", pytorch_optimizer.Grams, adam_like, _ADAM_DECAY),
    printed_peer(
        "cautious_adamw", "the paper's algorithm", CautiousAdamW, _ADAM_DECAY,
        "pytorch_optimizer divides by (kept + 1)/numel, as the paper does and its authors' code does not",
    ),
)  # fmt: skip

_LATER: tuple[Peer, ...] = (
    torch_peer(
        "fadam", pytorch_optimizer.FAdam,
        lambda h: {
            **adam_like(h), "eps_2": h["eps2"], "clip": h["c"], "p": h["rho"], "momentum_dtype": torch.float64,
            "fim_dtype": torch.float64,
        },
        {**_ADAM_DECAY, "eps": 0.02, "eps2": 0.03, "c": 0.7, "rho": 0.4}, "its states are float32 where not told",
    ),
    inside(
        torch_peer(
            "adagc", pytorch_optimizer.AdaGC,
            lambda h: {
                **adam_like(h), "beta": h["beta"], "lambda_abs": h["lambda_abs"], "lambda_rel": h["lambda_rel"],
                "warmup_steps": h["warmup"],
            },
            {**_ADAM_DECAY, "beta": 0.7, "lambda_abs": 3, "lambda_rel": 1.3, "warmup": 6},
            "the model's norm is float32 there, and is given in float64", rounds=True,
        ),
        patched(**{"pytorch_optimizer.optimizer.adagc.get_global_gradient_norm": squares}),
        "theirs takes norms in float64",
    ),
    flattened(
        torch_peer(
            "amos", pytorch_optimizer.Amos, same("lr", "beta", "momentum", "extra_l2", "eps"),
            {"lr": 0.04, "beta": 0.9, "momentum": 0.6, "extra_l2": 0.03, "eps": 1e-6},
        )
    ),
    torch_peer(
        "stable_spam", pytorch_optimizer.StableSPAM,
        lambda h: {
            **adam_like(h), "gamma1": h["gamma1"], "gamma2": h["gamma2"], "theta": h["gamma3"],
            "update_proj_gap": int(h["gap"]),
        },
        {**_ADAM, "gamma1": 0.6, "gamma2": 0.8, "gamma3": 0.9, "gap": 9},
    ),
    torch_peer(
        "adamwsn", pytorch_optimizer.AdamWSN, adam_like, _ADAM_DECAY,
        "every tensor is a group: subsets are the rows of a matrix, a vector has Adam", prepare=_rows_as_subsets,
    ),
    torch_peer(
        "adanorm + decay", pytorch_optimizer.AdaNorm, lambda h: {**adam_like(h), "r": h["gamma"]},
        {**_ADAM_DECAY, **_TINY, "gamma": 0.8}, f"{_EPS_EARLY}; {_ROOT}", prepare=nothing_under_the_root,
    ),
    torch_peer("adams", pytorch_optimizer.AdamS, adam_like, _ADAM_DECAY),
    torch_peer(
        "mars_lion", pytorch_optimizer.MARS,
        lambda h: {
            "lr": h["lr"], "betas": (h["beta"], 0.99), "gamma": h["gamma"], "weight_decay": h["weight_decay"],
            "mars_type": "lion", "optimize_1d": True,
        },
        {"lr": 0.02, "beta": 0.8, "gamma": 0.1, "weight_decay": 0.3},
    ),
    torch_peer(
        "adashift(keep=4)", pytorch_optimizer.AdaShift,
        lambda h: {"lr": h["lr"], "betas": (h["beta1"], h["beta2"]), "eps": h["eps"], "keep_num": 4},
        {"lr": 0.03, "beta1": 0.8, "beta2": 0.95, "eps": 1e-6},
    ),
    optax_peer(
        "lbfgs_direction(memory=1)", "optax.scale_by_lbfgs",
        lambda h: optax.chain(optax.scale_by_lbfgs(1), optax.scale(-h["lr"])), {"lr": 1.0},
        "memories of several pairs are compared on a function: with random gradients, differences grow without bound",
    ),
    torch_peer(
        "l2 >> aida", pytorch_optimizer.Aida, lambda h: {**adam_like(h), "xi": h["xi"]},
        {**_ADAM_DECAY, "eps": 1e-4, "xi": 1e-3}, f"{_EPS_EARLY.removesuffix(': eps is tiny here')}; {_ROOT}",
        prepare=_late_eps,
    ),
    torch_peer(
        "sgdsai", pytorch_optimizer.SGDSaI, same("lr", "momentum", "weight_decay", "eps"),
        {"lr": 0.002, "momentum": 0.8, "weight_decay": 0.3, "eps": 0.1},
    ),
    optax_peer(
        "ldog", "optax.scale_by_distance_over_gradients",
        lambda h: optax.chain(
            optax.scale_by_distance_over_gradients(h["r_rel"], h["eps"], global_scale=h["lr"]), optax.scale(-1),
        ),
        {"lr": 0.9, "r_rel": 0.02, "eps": 1e-3},
    ),
    torch_peer(
        "l2 >> apollo_dqn", pytorch_optimizer.ApolloDQN,
        same("lr", "beta", "eps", "weight_decay", warmup_steps=0),
        {"lr": 0.01, "beta": 0.8, "eps": 1e-3, "weight_decay": 0.07},
    ),
    torch_peer(
        "nero", pytorch_optimizer.Nero, same("lr", "beta", "eps"), {"lr": 0.05, "beta": 0.9, "eps": 1e-3},
    ),
    torch_peer(
        "dadapt_adagrad", pytorch_optimizer.DAdaptAdaGrad, same("lr", "momentum", "eps", "d0"),
        {"lr": 0.7, "momentum": 0.3, "eps": 1e-3, "d0": 0.003}, "theirs sums in float32", rounds=True,
    ),
    inside(
        torch_peer(
            "dadapt_sgd", pytorch_optimizer.DAdaptSGD, same("lr", "momentum", "d0"),
            {"lr": 0.7, "momentum": 0.8, "d0": 0.01}, "theirs sums in float32", rounds=True,
        ),
        patched(**{"pytorch_optimizer.optimizer.dadapt.get_global_gradient_norm": squares}),
        "theirs takes norms in float64",
    ),
    torch_peer(
        "dadapt_lion", pytorch_optimizer.DAdaptLion,
        lambda h: {
            "lr": h["lr"], "betas": (h["beta1"], h["beta2"]), "d0": h["d0"], "weight_decay": h["weight_decay"],
            "weight_decouple": True,
        },
        {"lr": 0.7, "beta1": 0.8, "beta2": 0.95, "d0": 0.01, "weight_decay": 0.07}, "theirs sums in float32",
        rounds=True,
    ),
)  # fmt: skip

_MODEL_WIDE: tuple[Peer, ...] = (
    optax_peer(
        "l2 >> dog", "optax.contrib.dog",
        lambda h: optax.contrib.dog(h["lr"], ("heuristic", h["r_rel"]), h["eps"], h["weight_decay"]),
        {"lr": 0.9, "r_rel": 0.02, "eps": 1e-3, "weight_decay": 0.05},
    ),
    optax_peer(
        "l2 >> dowg", "optax.contrib.dowg",
        lambda h: optax.contrib.dowg(h["lr"], h["d0"], h["eps"], h["weight_decay"]),
        {"lr": 0.9, "d0": 0.01, "eps": 1e-3, "weight_decay": 0.05},
    ),
    optax_peer(
        "prodigy", "optax.contrib.prodigy",
        lambda h: optax.contrib.prodigy(
            h["lr"], (h["beta1"], h["beta2"]), h["beta3"], h["eps"], h["d0"], h["d_coef"], h["weight_decay"],
        ),
        {**_ADAM_DECAY, "lr": 0.7, "beta3": 0.9, "d0": 0.01, "d_coef": 1.5, "bias_correction": 1},
    ),
    optax_peer(
        "dadapt_adam", "optax.contrib.dadapt_adamw",
        lambda h: optax.contrib.dadapt_adamw(
            h["lr"], (h["beta1"], h["beta2"]), h["eps"], h["d0"], h["weight_decay"],
        ),
        {**_ADAM_DECAY, "lr": 0.7, "d0": 0.01, "bias_correction": 1},
    ),
    torch_peer(
        "schedule_free_sgd", pytorch_optimizer.ScheduleFreeSGD,
        lambda h: {**_schedule_free(h), "momentum": h["momentum"]},
        {**_AVERAGED, "momentum": 0.8, "warmup_steps": 7, "r": 0.5},
    ),
    optax_peer(
        "schedule_free_sgd", "optax.contrib.schedule_free_sgd",
        lambda h: optax.contrib.schedule_free_sgd(
            h["lr"], b1=h["momentum"], weight_decay=h["weight_decay"], weight_lr_power=h["weight_lr_power"],
        ),
        {**_AVERAGED, "momentum": 0.8},
    ),
    torch_peer(
        "schedule_free_adamw", pytorch_optimizer.ScheduleFreeAdamW,
        lambda h: {**_schedule_free(h), **adam_like(h)}, {**_ADAM, **_AVERAGED, "warmup_steps": 7, "r": 0.5},
        _ROOT, prepare=nothing_under_the_root,
    ),
    optax_peer(
        "schedule_free_adamw", "optax.contrib.schedule_free_adamw",
        lambda h: optax.contrib.schedule_free_adamw(
            h["lr"], weight_lr_power=h["weight_lr_power"], **_b1_b2(h),
        ),
        {**_ADAM, **_AVERAGED},
    ),
)  # fmt: skip

_TRANSFORMS: tuple[Peer, ...] = (
    replace(
        torch_peer(
            "transforms/orthograd >> momentum", _orthograd, same("lr", "momentum"), {"lr": 0.05, "momentum": 0.8},
        ),
        theirs="pytorch_optimizer.OrthoGrad",
    ),
    optax_peer(
        "transforms/clip_by_block_rms >> sgd", "optax.clip_by_block_rms",
        _before_sgd(lambda h: optax.clip_by_block_rms(h["threshold"])), {"lr": 0.05, "threshold": 0.7},
    ),
    optax_peer(
        "transforms/param_block_norm >> sgd", "optax.scale_by_param_block_norm",
        _before_sgd(lambda h: optax.scale_by_param_block_norm(h["min_scale"])), {"lr": 0.05, "min_scale": 0.9},
    ),
    optax_peer(
        "transforms/param_block_rms >> sgd", "optax.scale_by_param_block_rms",
        _before_sgd(lambda h: optax.scale_by_param_block_rms(h["min_rms"])), {"lr": 0.05, "min_rms": 0.9},
    ),
    torch_peer(
        "transforms/clip_by_norm >> momentum", torch.optim.SGD, same("lr", "momentum"),
        {"lr": 0.05, "momentum": 0.8, "max_norm": _MAX_NORM}, "after torch.nn.utils.clip_grad_norm_ of each tensor",
        prepare=_clipped(lambda params: [clip_grad_norm_([p], _MAX_NORM) for p in params]), usual=True,
    ),
    torch_peer(
        "transforms/clip_by_global_norm >> adamw", torch.optim.AdamW, adam_like,
        {**_ADAM_DECAY, "max_norm": _MAX_GLOBAL_NORM}, "after torch.nn.utils.clip_grad_norm_",
        prepare=_clipped(lambda params: clip_grad_norm_(params, _MAX_GLOBAL_NORM)), usual=True,
    ),
    optax_peer(
        "transforms/adaptive_clip >> sgd", "optax.adaptive_grad_clip", _unit_clip,
        {"lr": 0.05, "clipping": 0.3, "min_norm": 0.01}, "optax is told the axes of a unit",
    ),
    optax_peer(
        "transforms/trust_ratio >> sgd", "optax.scale_by_trust_ratio",
        _before_sgd(lambda _: optax.scale_by_trust_ratio()), {"lr": 0.05},
    ),
    printed_peer("adam >> transforms/cautious", "the paper's algorithm", CautiousAdamW, _ADAM),
    optax_peer(
        "transforms/centralize >> sgd", "optax.centralize", _before_sgd(lambda _: optax.centralize()), {"lr": 0.05},
    ),
    optax_peer(
        "transforms/normalize >> sgd", "optax.contrib.normalize", _before_sgd(lambda _: optax.contrib.normalize()),
        {"lr": 0.05},
    ),
    printed_peer(
        "transforms/noise >> sgd", "the paper's formula", NoisySGD, {"lr": 0.05, "noise_eta": 0.3, "noise_gamma": 0.6},
        "of the same random numbers, which are Philox4x32-10",
    ),
    optax_peer(
        "transforms/skip_not_finite >> adam", "optax.apply_if_finite",
        finite_adam, _ADAM,
    ),
    optax_peer(
        "transforms/normalize_by_norm >> sgd", "optax.normalize_by_update_norm",
        _before_sgd(lambda h: optax.normalize_by_update_norm(h["scale_factor"], h["norm_eps"])),
        {"lr": 0.05, "scale_factor": 0.7, "norm_eps": 0.01},
    ),
    optax_peer(
        "transforms/skip_large >> adam", "optax.skip_large_updates", _skipping_adam,
        {**_ADAM, "max_squared_norm": 500},
    ),
    printed_peer("transforms/sign_decay >> sgd", "subgradients of the penalty", SignDecay, {"lr": 0.05, "l1": 0.3}),
    optax_peer(
        "transforms/zero_nans >> sgd", "optax.zero_nans", _before_sgd(lambda _: optax.zero_nans()), {"lr": 0.05},
    ),
    optax_peer(
        "transforms/running_mean >> sgd", "optax.ema", _before_sgd(lambda h: optax.ema(h["mean_decay"])),
        {"lr": 0.05, "mean_decay": 0.8},
    ),
    printed_peer("adam >> transforms/cautious_decay", "the paper's algorithm", CautiouslyDecayed, _ADAM_DECAY),
)  # fmt: skip


REDUCING: tuple[Peer, ...] = (
    *_LAYERWISE,
    *_LATER,
    *_MODEL_WIDE,
    *_TRANSFORMS,
    *LISTED_REDUCING,
    *CAUTIOUS,
    *KIN_REDUCING,
    *FURTHER_REDUCING,
    *LAYERED,
)
