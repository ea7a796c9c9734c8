"""Rows of wrappers that keep norms, turn gradients, or leave a part of a step out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytorch_optimizer
import torch

from rulec.array_api import random
from tests.rules.caution import Cautioned
from tests.rules.matrices import SOAP
from tests.rules.printed import Printed
from tests.rules.printed_kin import HyperballAdam
from tests.rules.runs import Array, Hyper, Run, TorchRun
from tests.rules.sides import Inside, Instead, patched
from tests.rules.wrapper_peer import Start, WrapperPeer

_ADAM = {"lr": 0.03, "beta1": 0.8, "beta2": 0.95, "eps": 1e-6}


def _adam(h: Hyper) -> dict[str, Any]:
    decay = {"weight_decay": h["weight_decay"]} if "weight_decay" in h else {}
    return {"lr": h["lr"], "betas": (h["beta1"], h["beta2"]), "eps": h["eps"], **decay}


def _torch(kind: Any, keywords: Callable[[Hyper], Mapping[str, Any]]) -> Start:
    return lambda params, hyper: TorchRun(kind, keywords, params, hyper)


def _cautioned_adam(params: Sequence[Array], hyper: Hyper) -> Run:
    return Cautioned(TorchAdam, lambda new, old, h: new, params, hyper)


class TorchAdam(TorchRun):
    """torch's Adam."""

    def __init__(self, params: Sequence[Array], hyper: Hyper, *, shipped: bool = True) -> None:
        super().__init__(torch.optim.Adam, _adam, params, hyper, shipped=shipped)


def _in_a_basis(params: Sequence[Array], hyper: Hyper) -> Run:
    """pytorch_optimizer's SOAP in our first eigenbases, kept from sorting them; without momentum, which it turns.

    Its eps is added to a root without bias correction, so it has one that is next to nothing.
    """
    instead = Instead(torch, float32=torch.float64, argsort=lambda x, descending: torch.arange(len(x)))
    keywords = {"precondition_frequency": int(hyper["every"]), "shampoo_beta": hyper["basis_decay"], "weight_decay": 0}
    soap = _torch(SOAP, lambda h: {**_adam(h), **keywords})
    return Inside(soap, patched(**{"pytorch_optimizer.optimizer.soap.torch": instead}), params, hyper)


def _soap(params: Sequence[Array], hyper: Hyper) -> Run:
    """pytorch_optimizer's SOAP as it is."""
    keywords = {"precondition_frequency": int(hyper["every"]), "shampoo_beta": hyper["basis_decay"], "weight_decay": 0}
    return TorchRun(pytorch_optimizer.SOAP, lambda h: {**_adam(h), **keywords}, params, hyper)


class ObliqueMomentum(Printed):
    """Riemannian descent along columns of norm one, as Boumal (2023) has it in sections 3.6 and 4.3, with momentum."""

    def update(self, i: int, g: Array, h: Hyper) -> None:
        self.m[i] = h["momentum"] * self.m[i] + g
        step = self.m[i]
        if g.ndim == 2:
            step = np.stack([u - (x @ u) * x for x, u in zip(self.w[i].T, step.T, strict=True)], axis=1)
        self.w[i] = self.w[i] - h["lr"] * step
        if g.ndim == 2:
            self.w[i] = np.stack([x / np.sqrt(x @ x) for x in self.w[i].T], axis=1)


class MagmaRun(TorchRun):
    """pytorch_optimizer's Magma around AdamW, with a momentum of its own, our random numbers, and all in float64."""

    def __init__(self, params: Sequence[Array], hyper: Hyper) -> None:
        super().__init__(_magma, _magma_keywords, params, hyper, shipped=False)
        self.t = 0

    def step(self, grads: Sequence[Array], hyper: Hyper) -> None:
        self.t += 1
        drawn = iter(
            [random.uniform(random.stream(1, seed=0, tensor=i, draw=0, step=self.t))[0] for i in range(len(grads))]
        )
        ours = {
            "torch.bernoulli": lambda probability: torch.as_tensor(float(next(drawn) < probability)),
            "torch.Tensor.float": torch.Tensor.double,
        }
        with patched(**ours)():
            super().step(grads, hyper)


def _magma(tensors: Any, foreach: bool, **keywords: Any) -> Any:
    own = {key: keywords.pop(key) for key in ("mask_prob", "tau", "momentum_beta", "alignment_ema")}
    inner = torch.optim.AdamW(tensors, foreach=foreach, **keywords)
    return pytorch_optimizer.Magma(inner, moment_key=None, foreach=foreach, **own)


def _magma_keywords(h: Hyper) -> dict[str, Any]:
    decay = h["agreement_decay"]
    return {**_adam(h), "mask_prob": h["kept"], "tau": h["tau"], "momentum_beta": decay, "alignment_ema": decay}


CONSTRAINED: tuple[WrapperPeer, ...] = (
    WrapperPeer(
        "eigenbasis(adam)", "pytorch_optimizer.SOAP",
        {**_ADAM, "eps": 1e-300, "beta1": 0, "every": 4, "basis_decay": 0.9}, _in_a_basis, shapes=((5, 5), (3, 3)),
        note="theirs begins with our eigenvectors, does not sort them, has no momentum, which it turns, and computes "
        "in float64, with next to no eps, which is beside another root; square matrices alone", called=_soap,
    ),
    WrapperPeer(
        "hyperball(adam)", "HeavyBall's formula around Adam", _ADAM, lambda params, hyper: HyperballAdam(params),
        shapes=((3, 4), (2, 3, 4), (4, 2, 3, 2)), note="without vectors, which keep AdamW there",
    ),
    WrapperPeer(
        "oblique(momentum)", "Riemannian descent by hand", {"lr": 0.03, "momentum": 0.8},
        lambda params, hyper: ObliqueMomentum(params),
    ),
    WrapperPeer("cautious_step(adam)", "torch.optim.Adam, with caution by hand", _ADAM, _cautioned_adam),
    WrapperPeer(
        "magma(adamw)", "pytorch_optimizer.Magma",
        {**_ADAM, "weight_decay": 0.07, "kept": 0.6, "tau": 1.5, "agreement_decay": 0.8}, MagmaRun,
        note="theirs has a momentum of its own, our random numbers, and computes in float64",
    ),
)  # fmt: skip
