"""Rows of wrappers that change what a step leaves of the parameter: decay of several kinds, bounds, lookahead."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import optax
import pytorch_optimizer
import torch

from tests.rules.runs import Array, Hyper, OptaxRun, Run, TorchRun
from tests.rules.wrapper_peer import Start, WrapperPeer

_ADAM = {"lr": 0.03, "beta1": 0.8, "beta2": 0.95, "eps": 1e-6}
_DECAYED = {**_ADAM, "decay_rate": 0.07, "max_lr": 0.05}


def _adam(h: Hyper, weight_decay: float) -> Mapping[str, Any]:
    return {"lr": h["lr"], "betas": (h["beta1"], h["beta2"]), "eps": h["eps"], "weight_decay": weight_decay}


def _torch(kind: Any, keywords: Callable[[Hyper], Mapping[str, Any]]) -> Start:
    return lambda params, hyper: TorchRun(kind, keywords, params, hyper)


def _nonnegative(params: Sequence[Array], hyper: Hyper) -> Run:
    def make(h: Hyper) -> Any:
        adam = optax.adam(h["lr"], b1=h["beta1"], b2=h["beta2"], eps=h["eps"])
        return optax.chain(adam, optax.keep_params_nonnegative())

    return OptaxRun(make, params, hyper)


def _ranger(tensors: Any, **keywords: Any) -> Any:
    """Ranger that descends while its variance is unknown: as pytorch_optimizer ships it, it climbs there."""
    return pytorch_optimizer.Ranger(tensors, degenerated_to_sgd=True, **keywords)


class Snoo(TorchRun):
    """Every k steps of Adam, torch's SGD takes a step from the slow weights, whose gradient is the way back to them."""

    def __init__(self, params: Sequence[Array], hyper: Hyper) -> None:
        super().__init__(torch.optim.Adam, lambda h: _adam(h, 0), params, hyper)
        self.slow = [tensor.detach().clone() for tensor in self.tensors]
        outer = {"lr": hyper["outer_lr"], "momentum": hyper["outer_momentum"], "nesterov": True}
        self.outer, self.k, self.t = torch.optim.SGD(self.slow, **outer), int(hyper["k"]), 0

    def step(self, grads: Sequence[Array], hyper: Hyper) -> None:
        super().step(grads, hyper)
        self.t += 1
        if self.t % self.k:
            return
        with torch.no_grad():
            for slow, fast in zip(self.slow, self.tensors, strict=True):
                slow.grad = slow - fast
            self.outer.step()
            for slow, fast in zip(self.slow, self.tensors, strict=True):
                fast.copy_(slow)


_ANEW = "theirs has another weight decay before every step, for the same length of decay"

#: torch's AdamW decays by lr times its weight decay, which is given anew before every step.
DECAYS: tuple[WrapperPeer, ...] = (
    WrapperPeer(
        "fully_decoupled(adam)", "torch.optim.AdamW", _DECAYED,
        _torch(torch.optim.AdamW, lambda h: _adam(h, h["decay_rate"] / h["max_lr"])),
        note=_ANEW,
    ),
    WrapperPeer(
        "corrected_decay(adam)", "torch.optim.AdamW", _DECAYED,
        _torch(torch.optim.AdamW, lambda h: _adam(h, h["decay_rate"] * h["lr"] / h["max_lr"])),
        note=_ANEW,
    ),
    WrapperPeer(
        "fixed_decay(lion)", "pytorch_optimizer.Lion",
        {"lr": 0.01, "beta1": 0.8, "beta2": 0.95, "weight_decay": 0.0, "decay_rate": 0.07},
        _torch(
            pytorch_optimizer.Lion,
            lambda h: {
                "lr": h["lr"], "betas": (h["beta1"], h["beta2"]), "weight_decay": h["decay_rate"], "fixed_decay": True,
            },
        ),
    ),
    WrapperPeer(
        "centralize >> lookahead(radam)", "pytorch_optimizer.Ranger", {**_ADAM, "k": 4, "alpha": 0.3},
        _torch(_ranger, lambda h: {**_adam(h, 0), "k": int(h["k"]), "alpha": h["alpha"]}),
        note="with `degenerated_to_sgd`, without which theirs climbs at first",
    ),
    WrapperPeer(
        "snoo(adam)", "torch.optim.SGD around torch.optim.Adam",
        {**_ADAM, "k": 4, "outer_lr": 0.6, "outer_momentum": 0.4}, Snoo,
    ),
    WrapperPeer("nonnegative(adam)", "optax.keep_params_nonnegative", _ADAM, _nonnegative),
)  # fmt: skip
