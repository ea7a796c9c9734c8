"""Rows of rules with moments and momenta of their own, which no installed library has.

`FURTHER` are rules for each element alone, `FURTHER_REDUCING` those that reduce.
"""

from __future__ import annotations

from tests.rules.peer import Peer, printed_peer
from tests.rules.printed_momenta import FSGDM, GradPower
from tests.rules.printed_moments import AdoptAtan2, Expectigrad, HAdam, InnaProp, KourkoutasBeta, Madam, NosAdam

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
)  # fmt: skip
