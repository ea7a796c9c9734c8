"""Rows of the cautious rules: another implementation takes the step, and caution is applied to it by hand.

Caution is that of Liang, Chen, Liu and Liu (2024), with the mask's mean bounded by 1e-3 as their code does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import optax
import pytorch_optimizer
import torch

from tests.rules.peer import Peer, Start, adam_like, optax_peer, printed_peer, same, torch_peer
from tests.rules.printed import CautiousAdamW
from tests.rules.runs import Array, Hyper, OptaxRun, Run, TorchRun
from tests.rules.sides import nothing_under_the_root

_ADAM = {"lr": 0.03, "beta1": 0.8, "beta2": 0.95, "eps": 1e-6}
_ADAM_DECAY = {**_ADAM, "weight_decay": 0.07}

#: What decay makes of new parameters, for those before the step.
Decay = Callable[[Array, Array, Hyper], Array]


def decoupled(new: Array, old: Array, h: Hyper) -> Array:
    """Decoupled weight decay."""
    return new - h["lr"] * h["weight_decay"] * old


def proximal(new: Array, old: Array, h: Hyper) -> Array:
    """Adan's proximal weight decay."""
    return new / (1 + h["lr"] * h["weight_decay"])


class Cautioned:
    """A side that moves as another one does, without decay, where that agrees with the gradient; and decays itself."""

    def __init__(self, start: Start, decay: Decay, params: Sequence[Array], hyper: Hyper) -> None:
        self.inner = start(params, {**hyper, "weight_decay": 0.0})
        self.decay = decay

    def step(self, grads: Sequence[Array], hyper: Hyper) -> None:
        """One update."""
        before = self.inner.params()
        self.inner.step(grads, {**hyper, "weight_decay": 0.0})
        moved = []
        for old, new, g in zip(before, self.inner.params(), grads, strict=True):
            phi = (old - new) * g > 0
            way = np.where(phi, old - new, 0) / max(phi.mean(), 1e-3)
            moved.append(self.decay(old - way, old, hyper))
        set_params(self.inner, moved)

    def params(self) -> list[Array]:
        """The parameters now."""
        return self.inner.params()


def set_params(run: Run, values: Sequence[Array]) -> None:
    """Gives a side of torch or optax other parameters, and leaves its states."""
    if isinstance(run, OptaxRun):
        run.now = [np.asarray(value) for value in values]
        return
    assert isinstance(run, TorchRun)
    with torch.no_grad():
        for tensor, value in zip(run.tensors, values, strict=True):
            tensor.copy_(torch.tensor(value))


def cautioned(composed: str, peer: Peer, hyper: Hyper, decay: Decay = decoupled) -> Peer:
    """The row of a cautious rule, whose other side is that of the row without caution."""

    def start(params: Sequence[Array], hyper: Hyper, *, shipped: bool = False) -> Run:
        return Cautioned(peer.start, decay, params, hyper)

    note = "theirs is without caution, which is added by hand"
    return replace(peer, composed=composed, hyper=hyper, start=start, note=note, rounds=False, called=None)


class CautiousLamb(CautiousAdamW):
    """LAMB whose Adam is cautious: the trust ratio is of what caution and decay make."""

    def update(self, i: int, g: Array, h: Hyper) -> None:
        old = self.w[i]
        super().update(i, g, h)
        u = (old - self.w[i]) / h["lr"]
        size, length = np.linalg.norm(old), np.linalg.norm(u)
        self.w[i] = old - h["lr"] * (size / length if size and length else 1) * u


CAUTIOUS: tuple[Peer, ...] = (
    cautioned(
        "cautious_lion",
        optax_peer("", "optax.lion", lambda h: optax.lion(h["lr"], h["beta1"], h["beta2"], weight_decay=0), {}),
        {"lr": 0.01, "beta1": 0.8, "beta2": 0.95, "weight_decay": 0.3},
    ),
    cautioned(
        "cautious_laprop",
        optax_peer(
            "", "optax.chain(scale_by_rms, ema)",
            lambda h: optax.chain(
                optax.scale_by_rms(h["beta2"], h["eps"], eps_in_sqrt=False, bias_correction=True),
                optax.ema(h["beta1"]),
                optax.scale_by_learning_rate(h["lr"]),
            ),
            {},
        ),
        {**_ADAM_DECAY, "eps": 1e-4},
    ),
    cautioned(
        "cautious_adopt",
        optax_peer(
            "", "optax.contrib.adopt",
            lambda h: optax.contrib.adopt(h["lr"], b1=h["beta1"], b2=h["beta2"], eps=h["eps"]), {},
        ),
        {**_ADAM_DECAY, "eps": 1e-3},
    ),
    cautioned(
        "cautious_nadamw",
        torch_peer(
            "", torch.optim.NAdam, lambda h: {**adam_like(h), "momentum_decay": h["momentum_decay"]}, {}, rounds=True
        ),
        {**_ADAM_DECAY, "momentum_decay": 0.02},
    ),
    cautioned(
        "cautious_sgdw", torch_peer("", torch.optim.SGD, same("lr", "momentum", "dampening"), {}),
        {"lr": 0.05, "momentum": 0.8, "dampening": 0.3, "weight_decay": 0.1},
    ),
    cautioned(
        "cautious_mars",
        torch_peer(
            "", pytorch_optimizer.MARS, lambda h: {**adam_like(h), "gamma": h["gamma"], "optimize_1d": True}, {},
            prepare=nothing_under_the_root,
        ),
        {**_ADAM_DECAY, "eps": 1e-30, "gamma": 0.1},
    ),
    cautioned(
        "cautious_adan",
        torch_peer(
            "", pytorch_optimizer.Adan,
            lambda h: {"lr": h["lr"], "betas": (h["beta1"], h["beta2"], h["beta3"]), "eps": h["eps"]}, {},
        ),
        {"lr": 0.03, "beta1": 0.9, "beta2": 0.8, "beta3": 0.95, "eps": 1e-6, "weight_decay": 0.07}, proximal,
    ),
    printed_peer("cautious_lamb", "LAMB around the paper's algorithm", CautiousLamb, _ADAM_DECAY),
)  # fmt: skip
