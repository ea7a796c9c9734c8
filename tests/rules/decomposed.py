"""The rules with decompositions and solutions, and others that read rows and columns, beside what is not ours.

Rows are those of `tests.rules.matrices`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytorch_optimizer
import torch
from pytorch_optimizer.optimizer.scion import LMONorm

from rulec.array_api import random
from tests.rules.normed import NORMED
from tests.rules.peer import Peer, adam_like, printed_peer, torch_peer
from tests.rules.printed_axes import DASHAxes, KLSOAPAxes
from tests.rules.printed_decomposed import AdaGO, Dion, Dion2, Iso, NorDion2, SPlus
from tests.rules.printed_momenta import SpectralNormDecay
from tests.rules.printed_muons import Aurora, Mano, MarsM, MuonBP, SinkGD, TurboMuon
from tests.rules.printed_ordered import Root
from tests.rules.printed_subspaces import Frugal, LDAdam
from tests.rules.printed_whitened import KLSOAP, KLShampoo, Moso, PolarGrad, Spel
from tests.rules.projectors import WholeProjector
from tests.rules.runs import Hyper
from tests.rules.sides import flattened, inside, patched, routed
from tests.rules.spectra import SPECTRA

_ADAM = {"lr": 0.03, "beta1": 0.8, "beta2": 0.95, "eps": 1e-6}
_MUON = {
    "lr": 0.02, "momentum": 0.8, "weight_decay": 0.07, "ns_steps": 4, "adamw_lr": 0.03, "lr_at_start": 0.0,
    "adamw_eps": 1e-5, "beta1": 0.7, "beta2": 0.9,
}  # fmt: skip


def _adam() -> Peer:
    return torch_peer("adam", torch.optim.Adam, adam_like, {})


def _conda(h: Hyper) -> dict[str, Any]:
    return {**adam_like(h), "update_proj_gap": int(h["gap"]), "scale": h["scale"]}


class Kron(pytorch_optimizer.Kron):
    """Theirs, with our random numbers, which the parameter and the step determine."""

    def step(self, closure: Any = None) -> Any:
        self.at: int = getattr(self, "at", 0) + 1
        self.tensor = -1
        draws = patched(**{"pytorch_optimizer.optimizer.psgd.torch.randn_like": self._drawn})
        with draws():
            return super().step(closure)

    def _drawn(self, like: torch.Tensor, **_: Any) -> torch.Tensor:
        self.tensor += 1
        drawn = random.normal(like.numel(), seed=0, tensor=self.tensor, draw=0, step=self.at)
        return torch.from_numpy(np.asarray(drawn).reshape(tuple(like.shape)))


def _solve_right(x: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    """`x @ inv(a)` in float64, where theirs is in float32."""
    return torch.linalg.solve_triangular(a, x, upper=True, left=False)


def _kron(h: Hyper) -> dict[str, Any]:
    return {
        "lr": h["lr"], "momentum": h["momentum"], "weight_decay": h["weight_decay"], "precondition_dtype": None,
        "pre_conditioner_update_probability": 1 / h["every"], "balance_prob": 0.0,
    }  # fmt: skip


def _shampoo(h: Hyper) -> dict[str, Any]:
    return {
        "lr": h["lr"], "betas": (h["beta1"], h["beta2"]), "matrix_eps": h["eps"], "use_svd": True,
        "start_preconditioning_step": int(h["start"]), "preconditioning_compute_steps": int(h["every"]),
        "shape_interpretation": False,
    }  # fmt: skip


def _dash(h: Hyper) -> dict[str, Any]:
    return {
        "lr": h["lr"], "betas": (h["beta1"], h["beta2"]), "grafting_beta": h["beta3"], "eps": h["eps"],
        "matrix_eps": h["matrix_eps"], "precondition_frequency": int(h["every"]), "inverse_root_method": "eigh",
    }  # fmt: skip


def _scion(kind: LMONorm) -> Any:
    def keywords(h: Hyper) -> dict[str, Any]:
        return {"lr": h["lr"], "momentum": h["alpha"], "scale": h["scale"], "norm_type": kind}

    return keywords


_SCION = {"lr": 0.02, "alpha": 0.3, "scale": 1.7}
_AUTO = torch_peer("scion", pytorch_optimizer.SCION, _scion(LMONorm.AUTO), {})


def _norm_peer(name: str, kind: LMONorm) -> Peer:
    """SCION with one norm for matrices; vectors have theirs."""
    return flattened(routed(torch_peer(name, pytorch_optimizer.SCION, _scion(kind), _SCION), _AUTO))


_SCALED: tuple[Peer, ...] = (
    routed(
        torch_peer(
            "racs", pytorch_optimizer.RACS,
            lambda h: {key: h[key] for key in ("lr", "beta", "alpha", "gamma", "eps")},
            {**_ADAM, "beta": 0.8, "alpha": 0.3, "gamma": 1.05},
        ),
        _adam(), batches=True,
    ),
    torch_peer(
        "adalite + decay", pytorch_optimizer.Adalite,
        lambda h: {
            **adam_like({**h, "eps": 0}), "eps1": h["eps1"], "eps2": h["eps2"], "tau": h["tau"],
            "g_norm_min": h["least_norm"], "ratio_min": h["least_ratio"],
        },
        {
            "lr": 0.03, "beta1": 0.8, "beta2": 0.95, "eps1": 1e-4, "eps2": 1e-9, "tau": 0.7, "least_norm": 0.1,
            "least_ratio": 0.2, "weight_decay": 0.07,
        },
    ),
    _norm_peer("scion_sign", LMONorm.SIGN), _norm_peer("scion_row", LMONorm.ROW),
    _norm_peer("scion_col", LMONorm.COL),
)  # fmt: skip

_CONDA = inside(
    routed(
        torch_peer(
            "conda", pytorch_optimizer.Conda, _conda, {**_ADAM, "gap": 4, "scale": 0.6}, "with our singular vectors"
        ),
        _adam(),
    ),
    patched(**{"pytorch_optimizer.optimizer.conda.GaLoreProjector": WholeProjector}),
    "theirs has our singular vectors, which are float64 and have fixed signs",
)


def _kron_peer(name: str) -> Peer:
    return torch_peer(
        name, Kron, _kron, {"lr": 0.02, "momentum": 0.8, "weight_decay": 0, "every": 2},
        "with our random numbers, a fixed interval, no balancing, and in float64",
    )  # fmt: skip


def _wide(peer: Peer) -> Peer:
    return inside(
        peer,
        patched(**{"pytorch_optimizer.optimizer.psgd.solve_triangular_right": _solve_right}),
        "theirs solves triangles in float64 instead of float32",
    )


def _scalable(name: str) -> Peer:
    return torch_peer(
        name, pytorch_optimizer.ScalableShampoo, _shampoo,
        {"lr": 0.02, "beta1": 0.8, "beta2": 0.9, "eps": 0.01, "start": 5, "every": 3},
        "with exact roots, and tensors in the shapes they have",
    )  # fmt: skip


_DASH = {**_ADAM, "beta3": 0.9, "matrix_eps": 1e-3, "every": 3}

_SOLVED: tuple[Peer, ...] = (
    _wide(flattened(_kron_peer("kron"))), _wide(_kron_peer("kron_axes")), flattened(_scalable("scalableshampoo")),
    _scalable("scalableshampoo_axes"),
    routed(
        torch_peer(
            "dash", pytorch_optimizer.DASH, _dash, _DASH,
            "with exact roots, and one block for each tensor",
        ),
        _adam(), batches=True,
    ),
    printed_peer(
        "dash_axes", "the formulas of the authors' code, with the factors of Distributed Shampoo", DASHAxes, _DASH
    ),
)  # fmt: skip

_PRINTED: tuple[Peer, ...] = (
    printed_peer("adago", "its Algorithm 1", AdaGO, {**_MUON, "gamma": 2.0, "eps": 0.003, "start": 0.5}),
    printed_peer(
        "dion", "its Algorithm 1", Dion,
        {
            "lr": 0.02, "mu": 0.9, "eps": 1e-8, "rank": 2, "weight_decay": 0.07, "adamw_lr": 0.03,
            "lr_at_start": 0.0, "beta1": 0.7, "beta2": 0.9,
        },
        "with our random matrix",
    ),
    printed_peer(
        "dion2", "the authors' code", Dion2,
        {
            "lr": 0.02, "mu": 0.9, "fraction": 0.4, "weight_decay": 0.07, "adamw_lr": 0.03,
            "lr_at_start": 0.0, "beta1": 0.7, "beta2": 0.9, "ns_steps": 5,
        },
    ),
    printed_peer(
        "nordion2", "the authors' code", NorDion2,
        {
            "lr": 0.02, "mu": 0.9, "beta": 0.8, "fraction": 0.6, "eps": 1e-6, "weight_decay": 0.07, "adamw_lr": 0.03,
            "lr_at_start": 0.0, "adamw_eps": 1e-8, "beta1": 0.7, "beta2": 0.9, "ns_steps": 5,
        },
    ),
    printed_peer(
        "iso", "its formula", Iso,
        {
            "lr": 0.02, "momentum": 0.8, "adamw_lr": 0.03, "lr_at_start": 0.0, "beta1": 0.7, "beta2": 0.9,
            "weight_decay": 0.07,
        },
    ),
    printed_peer(
        "splus", "its Algorithm 1", SPlus,
        {"lr": 0.3, "beta1": 0.8, "beta2": 0.9, "beta3": 0.9, "weight_decay": 0.07, "other": 0.1, "every": 4},
    ),
)  # fmt: skip

_BASES = {**_ADAM, "eps": 1e-8, "every": 3}

_WHITENED: tuple[Peer, ...] = (
    printed_peer("kl_shampoo", "the paper's Figure 2", KLShampoo, {**_BASES, "initial": 0.3}),
    printed_peer(
        "kl_soap", "the paper's Figure 2", KLSOAP, {**_BASES, "eps": 1e-4, "every": 9}, "with our first eigenvectors"
    ),
    printed_peer(
        "kl_soap_axes",
        "the paper's Figure 2, for the axes of the authors' code",
        KLSOAPAxes,
        {**_BASES, "eps": 1e-4, "every": 9},
        "with our first eigenvectors",
    ),
    printed_peer(
        "moso", "its formula", Moso, {**_ADAM, "eps": 1e-8, "momentum": 0.7, "beta": 0.9, "weight_decay": 0.07}
    ),
    printed_peer("polargrad", "the paper's equation for momentum", PolarGrad, _MUON),
    printed_peer("spel", "the paper's equation", Spel, {**_MUON, "ns_steps": 5}),
)

#: The kin of Muon.
_MUONS: tuple[Peer, ...] = (
    printed_peer(
        "muonbp", "its Algorithm 1", MuonBP, {**_MUON, "block_lr": 0.6, "blocks": 3, "period": 4}
    ),
    printed_peer(
        "turbo_muon", "the authors' code", TurboMuon,
        {**{key: value for key, value in _MUON.items() if key != "ns_steps"}, "iterations": 4},
    ),
    printed_peer("root", "the authors' code", Root, {**_MUON, "kept": 0.7}),
    printed_peer("mars_m", "the authors' code", MarsM, {**_MUON, "gamma": 0.05}),
    printed_peer(
        "mano", "the authors' code", Mano,
        {**{key: x for key, x in _MUON.items() if key not in ("ns_steps", "adamw_eps")}, "eps": 1e-8},
    ),
    printed_peer(
        "sinkgd", "its Algorithm 4", SinkGD, {**_ADAM, "rounds": 3, "floor": 1e-30, "adam_lr": 0.03, "lr_at_start": 0.0}
    ),
    printed_peer(
        "aurora", "the authors' code", Aurora,
        {
            **{key: x for key, x in _MUON.items() if key != "ns_steps"}, "eps": 1e-7, "rounds": 3, "power": 0.4,
            "iterations": 6,
        },
    ),
)  # fmt: skip

#: Steps in subspaces of the gradient, and decay in one of the weights.
_SUBSPACES: tuple[Peer, ...] = (
    printed_peer(
        "ldadam", "the authors' code", LDAdam, {**_ADAM, "rho": 0.7, "rank": 2, "weight_decay": 0.07},
        "with our first singular vectors",
    ),
    printed_peer(
        "frugal", "the authors' code", Frugal,
        {**_ADAM, "density": 0.4, "gap": 4, "inactive_scale": 0.6, "weight_decay": 0.07}, "with our singular vectors",
    ),
    printed_peer(
        "sgd >> transforms/spectral_norm_decay", "singular vectors by hand", SpectralNormDecay,
        {"lr": 0.05, "spectral_rate": 0.4},
    ),
)  # fmt: skip

DECOMPOSED: tuple[Peer, ...] = (
    *_SCALED,
    _CONDA,
    *_SOLVED,
    *_PRINTED,
    *_WHITENED,
    *_MUONS,
    *_SUBSPACES,
    *NORMED,
    *SPECTRA,
)
