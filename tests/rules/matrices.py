"""The rules with factored moments and matrix functions, beside implementations that are not ours.

Rows are those of `tests.rules.peers`; the other side is made of several by `tests.rules.sides`. Where theirs computes
in float32 or bfloat16 whatever it is given, the names that say so hold float64 while it steps.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import optax
import pytorch_optimizer
import torch
from pytorch_optimizer.optimizer.utils.matrix import zero_power_via_newton_schulz_5

from rulec.compiler.matrix import MATRIX
from rulec.language.expr.node import Op
from tests.rules.decomposed import DECOMPOSED
from tests.rules.peer import Peer, adam_like, optax_peer, printed_peer, same, torch_peer
from tests.rules.printed_matrices import Apollo, ApolloMini
from tests.rules.projectors import Projector, StandardProjector
from tests.rules.runs import Array, Hyper, Run, TorchRun
from tests.rules.sides import Instead, flattened, inside, patched, routed, transposed


class EveryGroup(TorchRun):
    """An optimizer whose groups all have the hyper-parameters of the step."""

    def step(self, grads: Sequence[Any], hyper: Hyper) -> None:
        for group in self.optimizer.param_groups:
            group.update(self.keywords(hyper))
        super().step(grads, hyper)


class _Model:
    """What AdamMini looks through for parameters: matrices are queries, whose rows it may take for heads."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = tensors

    def named_parameters(self) -> list[tuple[str, torch.Tensor]]:
        return [(f"{i}.{'q_proj.weight' if p.ndim == 2 else 'rest'}", p) for i, p in enumerate(self.tensors)]


def _adam_mini(tensors: Sequence[torch.Tensor], foreach: bool, **keywords: Any) -> Any:
    made = pytorch_optimizer.AdamMini(_Model(tensors), foreach=foreach, **keywords)
    for group in made.param_groups:
        if "parameter_per_head" in group:
            group["parameter_per_head"] = group["params"][0].shape[1]
    return made


def _torch_muon(tensors: Sequence[torch.Tensor], foreach: bool, **keywords: Any) -> Any:
    return torch.optim.Muon(tensors, **keywords)


def _adamuon(tensors: Sequence[torch.Tensor], foreach: bool, **keywords: Any) -> Any:
    return pytorch_optimizer.AdaMuon([{"params": tensors, **keywords}], foreach=foreach)


def _normuon(tensors: Sequence[torch.Tensor], foreach: bool, **keywords: Any) -> Any:
    return pytorch_optimizer.NorMuon([{"params": tensors, **keywords}], foreach=foreach)


class Shampoo(pytorch_optimizer.Shampoo):
    """Theirs, with roots from the first step on; as it is they are zero until the first multiple of the interval."""

    def step(self, closure: Any = None) -> Any:
        every = self.preconditioning_compute_steps
        self.preconditioning_compute_steps = every if "step" in self.param_groups[0] else 1
        loss = super().step(closure)
        self.preconditioning_compute_steps = every
        return loss


class SOAP(pytorch_optimizer.SOAP):
    """Theirs, beginning in our eigenbases.

    The first gradient of a matrix that is not square has covariances of less than full rank, and any basis of their
    null space is one: the two sides must begin with the same.
    """

    def update_pre_conditioner(self, grad: torch.Tensor, state: dict[str, Any], *args: Any, **keywords: Any) -> None:
        if state["Q"] is None:
            sides = [(n, math.prod(grad.shape[:k]), math.prod(grad.shape[k + 1 :])) for k, n in enumerate(grad.shape)]
            g = grad.numpy().reshape(1, len(grad), -1)
            covariances = [MATRIX[Op.GRAM].compute(g, *each) for each in sides]
            bases = [MATRIX[Op.EIGH].compute(-(1 - state["shampoo_beta"]) * c) for c in covariances]
            state["Q"] = [torch.from_numpy(basis[0].copy()) for basis in bases]
        super().update_pre_conditioner(grad, state, *args, **keywords)


def _fira(tensors: Sequence[torch.Tensor], foreach: bool, **keywords: Any) -> Any:
    return pytorch_optimizer.Fira([{"params": tensors, **keywords}], foreach=foreach)


def _galore(tensors: Sequence[torch.Tensor], foreach: bool, **keywords: Any) -> Any:
    return pytorch_optimizer.GaLore([{"params": tensors, **keywords}], foreach=foreach)


def _named(peer: Peer, theirs: str) -> Peer:
    return replace(peer, theirs=theirs)


def _adam(composed: str, prefix: str = "") -> Peer:
    """The side for what a rule does not apply to, whose hyper-parameters may have a prefix of their own."""

    def keywords(h: Hyper) -> dict[str, Any]:
        return adam_like({**h, **{k.removeprefix(prefix): v for k, v in h.items() if prefix and k.startswith(prefix)}})

    return torch_peer(composed, torch.optim.AdamW if prefix else torch.optim.Adam, keywords, {})


def _came(h: Hyper) -> dict[str, Any]:
    return {
        "lr": h["lr"], "betas": (h["beta1"], h["beta2"], h["beta3"]), "eps1": h["eps1"], "eps2": h["eps2"],
        "clip_threshold": h["d"], "weight_decay": h["weight_decay"],
    }  # fmt: skip


def _without_relative_step(h: Hyper) -> dict[str, Any]:
    return {
        "lr": h["lr"], "betas": (None, 1.0 - 1e-12), "decay_rate": -h["decay"], "eps1": h["eps1"], "eps2": h["eps2"],
        "clip_threshold": h["d"], "relative_step": False,
    }  # fmt: skip


def _optax_adafactor(h: Hyper) -> Any:
    """optax's parts, whose decay is float32 as shipped, and with a relative step."""
    return optax.chain(
        optax.scale_by_factored_rms(
            decay_rate=h["decay"],
            min_dim_size_to_factor=1,
            epsilon=h["eps1"],
            decay_rate_fn=lambda step, exponent: 1 - (step + 1.0) ** -exponent,
        ),
        optax.clip_by_block_rms(h["d"]),
        optax.scale_by_learning_rate(lambda count: jax.numpy.minimum(h["lr"], (count + 1.0) ** -0.5)),
        optax.scale_by_param_block_rms(h["eps2"]),
    )


def _muon(h: Hyper) -> dict[str, Any]:
    return {key: h[key] for key in ("lr", "momentum", "weight_decay")} | {"ns_steps": int(h["ns_steps"])}


def _normuon_keywords(h: Hyper) -> dict[str, Any]:
    return {**_muon(h), "beta2": h["beta"], "eps": h["eps"], **_NORMUON}


def _adamuon_keywords(h: Hyper) -> dict[str, Any]:
    return {
        "lr": h["lr"], "betas": (h["beta1"], h["beta2"]), "eps": h["eps"], "weight_decay": h["weight_decay"],
        "ns_steps": int(h["ns_steps"]), "use_muon": True,
    }  # fmt: skip


def _in_float64(module: str) -> Any:
    """A context in which a module of pytorch_optimizer orthogonalizes in float64."""
    exact = functools.partial(zero_power_via_newton_schulz_5, dtype=torch.float64)
    return patched(**{f"pytorch_optimizer.optimizer.{module}.zero_power_via_newton_schulz_5": exact})


def _orthogonalized(h: Hyper) -> dict[str, Any]:
    return {"lr": h["lr"], "ns_steps": int(h["ns_steps"]), "momentum": 0.0, "nesterov": False, "weight_decay": 0.0}


_WIDE = "theirs orthogonalizes in float64"
_WIDE_MUON = {"torch.Tensor.bfloat16": lambda x: x.double().clone()}
_NORMUON = {"use_muon": True, "nesterov": False, "update_scale": "match_rms", "weight_decouple": True}
_ADAM = {"lr": 0.03, "beta1": 0.8, "beta2": 0.95, "eps": 1e-6}
_FACTORED = {"lr": 0.05, "decay": 0.7, "eps1": 1e-5, "eps2": 0.1, "d": 0.8}
_APOLLO = {**_ADAM, "growth": 1.05, "gap": 4}
_MUON = {
    "lr": 0.02, "momentum": 0.8, "weight_decay": 0.07, "ns_steps": 4, "adamw_lr": 0.03, "lr_at_start": 0.0,
    "adamw_eps": 1e-5, "beta1": 0.7, "beta2": 0.9,
}  # fmt: skip
_ADAMUON = {"eps": 1e-3, **{key: value for key, value in _MUON.items() if key != "momentum"}}

_FACTORING: tuple[Peer, ...] = (
    torch_peer(
        "adafactor", torch.optim.Adafactor,
        lambda h: {**same("lr", "beta2_decay", "d", "weight_decay")(h), "eps": (h["eps1"], h["eps2"])},
        {"lr": 0.3, "beta2_decay": -0.7, "eps1": 0.05, "eps2": 0.4, "d": 1.2, "weight_decay": 0.07},
    ),
    torch_peer(
        "adafactor_paper", pytorch_optimizer.AdaFactor, _without_relative_step, _FACTORED,
        "with an absolute step, which is the relative one as long as lr is below 1/sqrt(t)",
    ),
    optax_peer(
        "adafactor_paper", "optax.chain(scale_by_factored_rms, ...)", _optax_adafactor, {**_FACTORED, "lr": 0.3},
        "the parts of optax.adafactor; its decay is float32 as shipped, and is given in float64",
    ),
    torch_peer(
        "came + decay", pytorch_optimizer.CAME, _came,
        {
            "lr": 0.02, "beta1": 0.8, "beta2": 0.95, "beta3": 0.9, "eps1": 1e-5, "eps2": 1e-3, "d": 0.9,
            "weight_decay": 0.07,
        },
    ),
    flattened(
        torch_peer(
            "sm3", pytorch_optimizer.SM3, same("lr", "momentum", "eps"), {"lr": 0.1, "momentum": 0.8, "eps": 1e-6},
        )
    ),
    torch_peer(
        "sm3_axes", pytorch_optimizer.SM3, same("lr", "momentum", "eps"), {"lr": 0.1, "momentum": 0.8, "eps": 1e-6}
    ),
)  # fmt: skip


def _start_mini(params: Sequence[Array], hyper: Hyper, *, shipped: bool = False) -> Run:
    return EveryGroup(_adam_mini, adam_like, params, hyper, shipped=shipped)


_MINI = inside(
    Peer(
        "adam_mini + decay", "pytorch_optimizer.AdamMini", {**_ADAM, "weight_decay": 0.07}, _start_mini,
        "theirs computes in float32; matrices are given as queries with one head for each row", rounds=True,
    ),
    patched(**{"pytorch_optimizer.optimizer.adam_mini.torch": Instead(torch, float32=torch.float64)}),
    "theirs computes in float64",
)  # fmt: skip

_ORTHOGONAL: tuple[Peer, ...] = (
    inside(
        routed(
            _named(
                torch_peer("muon", _torch_muon, _muon, _MUON, "torch orthogonalizes in bfloat16", rounds=True),
                "torch.optim.Muon",
            ),
            _adam("adamw", "adamw_"),
        ),
        patched(**_WIDE_MUON),
        _WIDE,
    ),
    inside(
        flattened(
            routed(
                _named(
                    torch_peer(
                        "normuon", _normuon, _normuon_keywords, {**_MUON, "beta": 0.9, "eps": 1e-3},
                        "theirs orthogonalizes in bfloat16; without Nesterov's momentum, and scaled to match a root "
                        "mean square", rounds=True,
                    ),
                    "pytorch_optimizer.NorMuon",
                ),
                _adam("adamw", "adamw_"),
            )
        ),
        _in_float64("muon.normuon"),
        _WIDE,
    ),
    inside(
        flattened(
            routed(
                _named(
                    torch_peer(
                        "adamuon", _adamuon, _adamuon_keywords, _ADAMUON,
                        "theirs orthogonalizes in bfloat16", rounds=True,
                    ),
                    "pytorch_optimizer.AdaMuon",
                ),
                _adam("adamw", "adamw_"),
            )
        ),
        _in_float64("muon.adamuon"),
        _WIDE,
    ),
    inside(
        flattened(
            torch_peer(
                "scion", pytorch_optimizer.SCION,
                lambda h: {"lr": h["lr"], "momentum": h["alpha"], "scale": h["scale"]},
                {"lr": 0.02, "alpha": 0.3, "scale": 1.7, "ns_steps": 5},
                "theirs orthogonalizes in bfloat16", rounds=True,
            )
        ),
        _in_float64("scion"),
        _WIDE,
    ),
    inside(
        flattened(
            routed(
                _named(
                    torch_peer(
                        "transforms/orthogonalize >> sgd", _torch_muon, _orthogonalized, {"lr": 0.05, "ns_steps": 4},
                        "without momentum and its factor for tall matrices, and in float64 as above",
                    ),
                    "torch.optim.Muon",
                ),
                torch_peer("sgd", torch.optim.SGD, same("lr"), {}),
            )
        ),
        patched(**_WIDE_MUON, **{"torch.optim._muon._adjust_lr": lambda lr, *_: lr}),
        f"{_WIDE}, and does not lengthen steps of tall matrices",
    ),
)  # fmt: skip


def _shampoo(name: str, batches: bool = False) -> Peer:
    """Theirs with a root for each dimension of matrices, and where `batches` of all others; Adagrad for the rest."""
    return routed(
        torch_peer(
            name, Shampoo,
            lambda h: {"lr": h["lr"], "matrix_eps": h["eps"], "preconditioning_compute_steps": int(h["every"])},
            {"lr": 0.1, "eps": 0.05, "every": 3, "adagrad_eps": 1e-3},
            "theirs has no roots before the first multiple of `every`, and here from the first step on",
        ),
        torch_peer("adagrad", torch.optim.Adagrad, lambda h: {"lr": h["lr"], "eps": h["adagrad_eps"]}, {}),
        batches=batches,
    )  # fmt: skip


_UNSORTED = "theirs sorts the bases by estimated eigenvalues, which it is kept from; "


def _soap(name: str, batches: bool = False, note: str = _UNSORTED) -> Peer:
    """Theirs with a basis for each dimension of matrices, and where `batches` of all others; Adam for the rest."""
    return routed(
        torch_peer(
            name, SOAP, lambda h: {**adam_like(h), "precondition_frequency": int(h["every"])}, {**_ADAM, "every": 9},
            f"{note}both begin with the same eigenvectors of the first gradient's covariances, which are of less than "
            "full rank",
        ),
        _adam("adam"),
        batches=batches,
    )  # fmt: skip


def _begun(peer: Peer, *, sorts: bool = False) -> Peer:
    """The row with theirs as ours is: SOAP's eigenvectors are the same at first."""
    kept = {} if sorts else {"argsort": lambda x, descending: torch.arange(len(x))}
    instead = Instead(torch, float32=torch.float64, **kept)
    order = "" if sorts else ", and does not sort them"
    said = f"theirs computes in float64{' and' if sorts else ','} begins with our eigenvectors{order}"
    return inside(peer, patched(**{"pytorch_optimizer.optimizer.soap.torch": instead}), said)


_PRECONDITIONED: tuple[Peer, ...] = (
    flattened(_shampoo("shampoo")), _shampoo("shampoo_axes", batches=True), _begun(flattened(_soap("soap"))),
    _begun(_soap("soap_axes", batches=True)), _begun(flattened(_soap("soap_sorted", note="")), sorts=True),
)  # fmt: skip

_LOW_RANK: tuple[Peer, ...] = (
    printed_peer("apollo", "its Algorithm 1", Apollo, {**_APOLLO, "rank": 2, "scale": 1.3}, "with our projections"),
    printed_peer("apollo_mini", "its Algorithm 1", ApolloMini, {**_APOLLO, "scale": 90}, "with our projections"),
    inside(
        routed(
            _named(
                torch_peer(
                    "galore", _galore,
                    lambda h: {
                        **adam_like(h), "rank": int(h["rank"]), "update_proj_gap": int(h["gap"]), "scale": h["scale"],
                        "projection_type": "std",
                    },
                    {**_ADAM, "rank": 2, "gap": 4, "scale": 0.4}, "with our singular vectors",
                ),
                "pytorch_optimizer.GaLore",
            ),
            _adam("adam"),
        ),
        patched(**{"pytorch_optimizer.optimizer.galore.GaLoreProjector": Projector}),
        "theirs has our singular vectors, which are float64 and have fixed signs",
    ),
)  # fmt: skip

_FIRA = inside(
    routed(
        transposed(
            _named(
                torch_peer(
                    "fira", _fira,
                    lambda h: {
                        **adam_like(h), "rank": int(h["rank"]), "update_proj_gap": int(h["gap"]), "scale": 1.0,
                        "projection_type": "std",
                    },
                    {**_ADAM, "rank": 2, "gap": 4, "growth": 1.01},
                    "with our singular vectors, of matrices given transposed: theirs projects columns of square ones",
                ),
                "pytorch_optimizer.Fira",
            )
        ),
        _adam("adam"),
    ),
    patched(**{"pytorch_optimizer.optimizer.fira.GaLoreProjector": StandardProjector}),
    "theirs has our singular vectors, which are float64 and have fixed signs",
)  # fmt: skip

MATRICES: tuple[Peer, ...] = (*_FACTORING, _MINI, *_ORTHOGONAL, *_PRECONDITIONED, *_LOW_RANK, _FIRA, *DECOMPOSED)
