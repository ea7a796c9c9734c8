"""Rows of the kin of Muon with steps by norms or roots: most of them are names of levanter's registry."""

from __future__ import annotations

from tests.rules.peer import Peer, printed_peer
from tests.rules.printed_norms import AdamHR, MuonHR, MuonRemez, MuonSphere, Namo, NamoD, Rmnp

_OTHERS = {"adamw_lr": 0.03, "lr_at_start": 0.0, "adamw_eps": 1e-5, "beta1": 0.7, "beta2": 0.9, "weight_decay": 0.07}
_ADAM = {"adam_lr": 0.03, "lr_at_start": 0.0, "beta1": 0.7, "beta2": 0.9, "eps": 1e-5}
_NAMO = {**_OTHERS, "lr": 0.15, "momentum": 0.8, "beta": 0.9, "eps": 1e-3, "scale": 0.3, "ns_steps": 4}

NORMED: tuple[Peer, ...] = (
    printed_peer("namo", "the authors' code", Namo, _NAMO),
    printed_peer("namo_d", "the authors' code", NamoD, {**_NAMO, "clamp": 0.6}),
    printed_peer("rmnp", "the authors' code", Rmnp, {**_OTHERS, "lr": 0.02, "momentum": 0.8, "eps": 1e-12}),
    printed_peer(
        "muon_remez", "singular values of levanter's formula", MuonRemez,
        {**_OTHERS, "lr": 0.02, "momentum": 0.8, "eps": 1e-6},
    ),
    printed_peer("adam_hr", "levanter's formula", AdamHR, {**_ADAM, "lr": 0.2}),
    printed_peer("muon_hr", "levanter's formula", MuonHR, {**_ADAM, "lr": 0.2, "momentum": 0.8, "ns_steps": 5}),
    printed_peer(
        "muon_sphere", "levanter's formula", MuonSphere,
        {**_ADAM, "lr": 0.2, "momentum": 0.8, "polar_steps": 8, "radius": 1.3},
    ),
)  # fmt: skip
