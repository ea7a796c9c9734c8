"""Rows of later kin of Muon, beside their algorithms as they are printed."""

from __future__ import annotations

from tests.rules.peer import Peer, printed_peer
from tests.rules.printed_muons import AdaMuonSign
from tests.rules.printed_spectra import (
    ASGO,
    COSMOS,
    DASGO,
    PRISM,
    EchoMuon,
    MuonAtan2,
    MuonH,
    Muown,
    NanochatMuon,
    Trion,
)

_ADAM = {"lr": 0.03, "beta1": 0.8, "beta2": 0.95, "eps": 1e-6}
_MUON = {
    "lr": 0.02, "momentum": 0.8, "weight_decay": 0.07, "ns_steps": 4, "adamw_lr": 0.03, "lr_at_start": 0.0,
    "adamw_eps": 1e-5, "beta1": 0.7, "beta2": 0.9,
}  # fmt: skip
_DECAYED = {**_ADAM, "eps": 1e-4, "weight_decay": 0.07, "ns_steps": 5}
_HYPERBALL = {
    "lr": 0.02, "momentum": 0.8, "ns_steps": 4, "adamw_lr": 0.03, "lr_at_start": 0.0, "beta1": 0.7, "beta2": 0.9,
    "eps": 1e-8, "weight_decay": 0.07,
}  # fmt: skip

#: Muon's iteration with other sizes, gates, bases and covariances.
SPECTRA: tuple[Peer, ...] = (
    printed_peer(
        "adamuon_sign", "the later versions' Algorithm 1", AdaMuonSign, {**_MUON, "eps": 1e-3, "nesterov": 0}
    ),
    printed_peer("adamuon_sign", "the authors' code", AdaMuonSign, {**_MUON, "eps": 1e-3, "nesterov": 1}),
    printed_peer("nanochat_muon", "the authors' code", NanochatMuon, {**_MUON, "beta": 0.7}),
    printed_peer(
        "muon_atan2", "the formula of adam-atan2-pytorch", MuonAtan2,
        {
            "lr": 0.03, "momentum": 0.8, "weight_decay": 0.07, "ns_steps": 4, "beta1": 0.7, "beta2": 0.9, "a": 1.4,
            "b": 0.9,
        },
    ),
    printed_peer("muonh", "levanter's formula", MuonH, _HYPERBALL),
    printed_peer("muown", "the authors' code", Muown, {**_DECAYED, "momentum": 0.7}),
    printed_peer("muown", "the authors' code without decay", Muown, {**_DECAYED, "momentum": 0.7, "weight_decay": 0}),
    printed_peer(
        "echomuon", "the authors' code", EchoMuon,
        {**_MUON, "slow": 0.95, "gate": 0.7, "floor": 0.2, "every": 3},
    ),
    printed_peer(
        "trion", "the authors' code", Trion,
        {
            "lr": 0.02, "mu": 0.9, "rank": 2, "weight_decay": 0.07, "adamw_lr": 0.03, "lr_at_start": 0.0,
            "beta1": 0.7, "beta2": 0.9, "eps": 1e-8, "ns_steps": 5,
        },
    ),
    printed_peer(
        "asgo", "the authors' code", ASGO,
        {
            "lr": 0.02, "momentum": 0.8, "beta": 0.7, "eps": 1e-6, "weight_decay": 0.07, "beta1": 0.7, "beta2": 0.9,
            "adamw_eps": 1e-5,
        },
        "with exact roots",
    ),
    printed_peer(
        "dasgo", "the authors' code", DASGO,
        {"lr": 0.02, "momentum": 0.8, "beta": 0.7, "eps": 1e-4, "weight_decay": 0.07, "beta1": 0.7, "beta2": 0.9},
    ),
    printed_peer(
        "cosmos", "the authors' code", COSMOS, {**_DECAYED, "lr_ratio": 0.3, "gamma": 0.4, "rank": 2},
        "with Adam for vectors as the paper has it",
    ),
    printed_peer("prism", "the paper's algorithm", PRISM, {**_MUON, "gamma": 0.6}),
)  # fmt: skip
