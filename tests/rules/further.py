"""Rows of rules with moments and momenta of their own, which no installed library has.

`FURTHER` are rules for each element alone, `FURTHER_REDUCING` those that reduce.
"""

from __future__ import annotations

import optax

from tests.rules.peer import Peer, optax_peer, printed_peer
from tests.rules.printed_dynamics import PSGLD, SGHMC, SGLD
from tests.rules.printed_momenta import (
    FSGDM,
    NSGDM,
    RDA,
    SGDHD,
    SNGM,
    SRSGD,
    AdagradDA,
    AdamHD,
    EFSignSGD,
    EqualBetas,
    ExponentiatedGradient,
    GradPower,
    L2Init,
    NagGs,
    Proximal,
    ProximalAdagrad,
    RelativeUpdate,
    UntunedWarmup,
    ZClip,
)
from tests.rules.printed_moments import (
    AGD,
    SGDF,
    ACClip,
    AdoptAtan2,
    EAdam,
    Expectigrad,
    GrokAdamW,
    HAdam,
    InnaProp,
    KourkoutasBeta,
    LionK,
    Madam,
    NosAdam,
    ScAdagrad,
)
from tests.rules.printed_ordered import PercentileClip
from tests.rules.printed_prodigy import ProdigyScheduleFree
from tests.rules.printed_subspaces import Suds

_NOISE = "of the same random numbers, which are Philox4x32-10"
_ADAM = {"lr": 0.03, "beta1": 0.8, "beta2": 0.95, "eps": 1e-6}

FURTHER: tuple[Peer, ...] = (
    printed_peer(
        "adopt_atan2", "the formula of adam-atan2-pytorch", AdoptAtan2,
        {"lr": 0.03, "beta1": 0.8, "beta2": 0.95, "a": 1.4, "b": 0.9},
    ),
    printed_peer("expectigrad", "the paper's algorithm", Expectigrad, {"lr": 0.03, "beta": 0.8, "eps": 1e-4}),
    printed_peer("hadam", "the paper's algorithm", HAdam, {**_ADAM, "order": 4}),
    printed_peer(
        "nosadam", "the paper's algorithm", NosAdam, {"lr": 0.03, "beta1": 0.8, "eps": 1e-6, "gamma": 0.4},
    ),
    printed_peer(
        "innaprop", "the paper's algorithm", InnaProp,
        {"lr": 0.03, "alpha": 0.3, "beta": 0.7, "sigma": 0.95, "eps": 1e-6, "weight_decay": 0.07},
    ),
    printed_peer(
        "fsgdm", "the paper's algorithm", FSGDM,
        {"lr": 0.02, "c_scaling": 0.1, "v_coefficient": 0.8, "n_stages": 7, "sigma": 30},
    ),
    printed_peer("transforms/grad_power >> sgd", "the paper's formula", GradPower, {"lr": 0.05, "exponent": 1.3}),
    printed_peer("eadam", "the paper's algorithm", EAdam, {**_ADAM, "eps": 1e-3}),
    printed_peer("agd", "the paper's algorithm", AGD, {"lr": 0.03, "beta1": 0.8, "beta2": 0.95, "switch": 0.5}),
    printed_peer(
        "acclip", "the paper's algorithm", ACClip,
        {"lr": 0.05, "beta1": 0.8, "beta2": 0.9, "eps": 1e-4, "alpha": 1.5},
    ),
    printed_peer("sc_adagrad", "the paper's algorithm", ScAdagrad, {"lr": 0.05, "xi1": 0.2, "xi2": 0.3}),
    printed_peer(
        "sgdf", "the paper's algorithm", SGDF, {"lr": 0.05, "beta1": 0.8, "beta2": 0.95, "eps": 1e-4, "gamma": 0.7},
    ),
    printed_peer("nag_gs", "the formulas of the authors' code", NagGs, {"lr": 0.1, "mu": 1.5, "gamma": 0.7}),
    printed_peer(
        "adagrad_da", "TensorFlow's documentation", AdagradDA,
        {"lr": 0.1, "initial": 0.2, "lambda1": 0.3, "lambda2": 0.4},
    ),
    printed_peer("rda", "the paper's algorithm", RDA, {"gamma": 7, "lambda1": 0.4}),
    printed_peer("exponentiated_gradient", "the paper's formula", ExponentiatedGradient, {"lr": 0.05}),
    optax_peer(
        "nadam_constant", "optax.nadam",
        lambda h: optax.nadam(h["lr"], b1=h["beta1"], b2=h["beta2"], eps=h["eps"]), _ADAM,
    ),
    printed_peer("signum_snr", "Adam of equal betas, by hand", EqualBetas, {"lr": 0.03, "momentum": 0.8}),
    printed_peer("srsgd", "the paper's formulas", SRSGD, {"lr": 0.03, "restart": 7}),
    printed_peer(
        "proximal_sgd", "the paper's formulas", Proximal, {"lr": 0.05, "lambda1": 0.8, "lambda2": 0.3},
    ),
    printed_peer(
        "proximal_adagrad", "TensorFlow's documentation", ProximalAdagrad,
        {"lr": 0.1, "initial": 0.2, "lambda1": 0.8, "lambda2": 0.3},
    ),
    printed_peer("transforms/l2_init >> sgd", "the paper's formula", L2Init, {"lr": 0.05, "pull": 0.4}),
    printed_peer(
        "sgd >> transforms/untuned_warmup", "the paper's formula", UntunedWarmup, {"lr": 0.05, "warmup_beta2": 0.8},
    ),
)  # fmt: skip

FURTHER_REDUCING: tuple[Peer, ...] = (
    printed_peer(
        "kourkoutas_beta", "the paper's algorithm", KourkoutasBeta,
        {
            "lr": 0.03, "beta1": 0.8, "beta2_max": 0.97, "beta2_min": 0.6, "eps": 1e-6, "alpha": 0.7,
            "tiny_spike": 1e-6, "warmup_steps": 3,
        },
    ),
    printed_peer(
        "madam", "the paper's algorithm", Madam, {"lr": 0.1, "beta": 0.9, "p_scale": 1.5, "g_bound": 1.2},
    ),
    printed_peer(
        "lion_k", "the paper's formulas", LionK,
        {"lr": 0.05, "beta1": 0.8, "beta2": 0.9, "order": 3, "weight_decay": 0.07},
    ),
    printed_peer("ef_signsgd", "the paper's algorithm", EFSignSGD, {"lr": 0.03}),
    printed_peer(
        "grokadamw", "the formulas of the authors' code", GrokAdamW,
        {
            "lr": 0.03, "beta1": 0.8, "beta2": 0.95, "eps": 1e-6, "weight_decay": 0.07, "alpha": 0.9, "lamb": 1.5,
            "gamma": 0.2, "signal": 0.7, "signal_decay": 0.3, "clip": 0.9,
        },
    ),
    printed_peer(
        "transforms/zclip >> sgd", "the paper's algorithm", ZClip,
        {"lr": 0.05, "z_thresh": 0.5, "z_alpha": 0.8, "clip_after": 4, "z_eps": 1e-6},
    ),
    printed_peer(
        "suds_adamw", "HeavyBall's formula", Suds, {**_ADAM, "eps": 1e-4, "weight_decay": 0.07, "precond_lr": 0.02},
    ),
    printed_peer(
        "prodigy_schedule_free", "the formulas of the authors' code", ProdigyScheduleFree,
        {
            "lr": 0.7, "beta1": 0.8, "beta2": 0.95, "beta3": 0.9, "eps": 1e-6, "weight_decay": 0.07, "d0": 0.01,
            "d_coef": 1.5, "growth_rate": 1.1, "decoupling_c": 6, "stride": 3,
        },
    ),
    printed_peer(
        "transforms/relative_update >> sgd", "the formula of emerging-optimizers", RelativeUpdate,
        {"lr": 0.05, "norm_floor": 1e-3},
    ),
    printed_peer(
        "transforms/percentile_clip >> sgd", "bitsandbytes' percentile_clipping", PercentileClip,
        {"lr": 0.05, "percentile": 5},
    ),
    printed_peer("nsgdm", "the paper's algorithm", NSGDM, {"lr": 0.1, "beta": 0.8}),
    printed_peer("sngm", "the paper's algorithm", SNGM, {"lr": 0.1, "momentum": 0.8}),
    printed_peer("sgd_hd", "the paper's algorithm", SGDHD, {"lr0": 0.02, "hypergrad_lr": 1e-5}),
    printed_peer(
        "adam_hd", "the paper's algorithm", AdamHD,
        {"lr0": 0.02, "hypergrad_lr": 1e-4, "beta1": 0.8, "beta2": 0.95, "eps": 1e-6},
    ),
    printed_peer("sgld", "the paper's formula", SGLD, {"lr": 0.02, "temperature": 0.7}, _NOISE),
    printed_peer(
        "psgld", "the paper's algorithm", PSGLD, {"lr": 0.02, "alpha": 0.8, "eps": 1e-3, "temperature": 0.7}, _NOISE,
    ),
    printed_peer(
        "sghmc", "the paper's formula", SGHMC,
        {"lr": 0.02, "friction": 0.3, "noise_estimate": 0.1, "temperature": 0.7}, _NOISE,
    ),
)  # fmt: skip
