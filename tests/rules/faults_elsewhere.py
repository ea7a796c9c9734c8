"""Faults in code that the tests do not install: written again in NumPy, and stepped beside the rule.

`python -m tests.rules.faults_elsewhere` steps classes of timm and torch_optimizer beside what is written here, where
they are installed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from tests.rules.faults import Fault
from tests.rules.measure import ALL_DIMENSIONS, Trial, largest_difference
from tests.rules.peer import adam_like, printed_peer, same
from tests.rules.printed import Printed
from tests.rules.printed_decomposed import WithAdam, orthogonal
from tests.rules.printed_norms import Namo
from tests.rules.runs import Array, Hyper, TorchRun

#: What the rows of each heading were read in.
READ = {
    "timm": "1.0.31",
    "torch_optimizer": "0.3.0",
    "levanter": "9263f81 of stanford-crfm/levanter, and 2337e53 of marin-community/marin",
    "llm-baselines": "1177da9 of armanbolatov/llm-baselines",
    "SRSGD": "d7dca55 of minhtannguyen/SRSGD, which is its authors'",
}

_ADAM = {"lr": 0.03, "beta1": 0.8, "beta2": 0.95, "eps": 1e-3, "weight_decay": 0.07}
_MATRIX = {
    "lr": 0.02, "momentum": 0.8, "weight_decay": 0.07, "ns_steps": 4, "adamw_lr": 0.03, "lr_at_start": 0.0,
    "adamw_eps": 1e-5, "beta1": 0.7, "beta2": 0.9,
}  # fmt: skip


class TimmAdopt(Printed):
    """timm's Adopt with decoupled decay: the first gradient fills the second moment, and nothing decays."""

    def update(self, i: int, g: Array, h: Hyper) -> None:
        if self.t == 1:
            self.v[i] = g**2
            return
        bound = (self.t - 1) ** 0.333
        share = np.clip(g / np.maximum(np.sqrt(self.v[i]), h["eps"]), -bound, bound)
        self.m[i] = h["beta1"] * self.m[i] + (1 - h["beta1"]) * share
        self.v[i] = h["beta2"] * self.v[i] + (1 - h["beta2"]) * g**2
        self.w[i] = (1 - h["lr"] * h["weight_decay"]) * self.w[i] - h["lr"] * self.m[i]


class TorchOptimizerSGDW(Printed):
    """torch_optimizer's SGDW: what is taken for the decay is no share of the weights."""

    def update(self, i: int, g: Array, h: Hyper) -> None:
        self.m[i] = g if self.t == 1 else h["momentum"] * self.m[i] + g
        self.w[i] = self.w[i] - h["lr"] * self.m[i] - h["lr"] * h["weight_decay"]


class TorchOptimizerPID(Printed):
    """torch_optimizer's PID, which stores gradients from the second step on."""

    def __init__(self, params: Sequence[Array]) -> None:
        super().__init__(params)
        self.last = [np.zeros_like(p) for p in params]

    def update(self, i: int, g: Array, h: Hyper) -> None:
        self.m[i] = h["momentum"] * self.m[i] + g
        if self.t > 1:
            self.v[i] = h["momentum"] * self.v[i] + (1 - h["momentum"]) * (g - self.last[i])
            self.last[i] = g
        self.w[i] = self.w[i] - h["lr"] * (g + h["integral"] * self.m[i] + h["derivative"] * self.v[i])


class TorchOptimizerLookahead(Printed):
    """torch_optimizer's Lookahead around torch's Adam: slow weights are those after the first step."""

    def __init__(self, params: Sequence[Array]) -> None:
        super().__init__(params)
        self.slow = [p.copy() for p in params]

    def update(self, i: int, g: Array, h: Hyper) -> None:
        beta1, beta2, t = h["beta1"], h["beta2"], self.t
        self.m[i] = beta1 * self.m[i] + (1 - beta1) * g
        self.v[i] = beta2 * self.v[i] + (1 - beta2) * g**2
        step = self.m[i] / (1 - beta1**t) / (np.sqrt(self.v[i] / (1 - beta2**t)) + h["eps"])
        self.w[i] = self.w[i] - h["lr"] * step
        if (t - 1) % h["k"] == 0:
            slow = self.w[i] if t == 1 else self.slow[i]
            self.w[i] = h["alpha"] * self.w[i] + (1 - h["alpha"]) * slow
            self.slow[i] = self.w[i].copy()


class LevanterAdopt(Printed):
    """Levanter's adopt, whose means are corrected for their start."""

    def update(self, i: int, g: Array, h: Hyper) -> None:
        v_hat = self.v[i] / (1 - h["beta2"] ** (self.t - 1)) if self.t > 1 else 0
        share = g / (np.sqrt(v_hat) + h["eps"]) if self.t > 1 else np.zeros_like(g)
        self.m[i] = h["beta1"] * self.m[i] + (1 - h["beta1"]) * share
        self.v[i] = h["beta2"] * self.v[i] + (1 - h["beta2"]) * g**2
        step = self.m[i] / (1 - h["beta1"] ** self.t)
        self.w[i] = self.w[i] - h["lr"] * (step + h["weight_decay"] * self.w[i])


class LevanterMars(Printed):
    """Levanter's mars without a bound on the norm of the model: no tensor's change is clipped."""

    def __init__(self, params: Sequence[Array]) -> None:
        super().__init__(params)
        self.last = [np.zeros_like(p) for p in params]

    def update(self, i: int, g: Array, h: Hyper) -> None:
        beta1, beta2, t = h["beta1"], h["beta2"], self.t
        c = g + h["gamma"] * beta1 / (1 - beta1) * (g - self.last[i])
        self.last[i] = g
        self.m[i] = beta1 * self.m[i] + (1 - beta1) * c
        self.v[i] = beta2 * self.v[i] + (1 - beta2) * c**2
        step = self.m[i] / (1 - beta1**t) / (np.sqrt(self.v[i] / (1 - beta2**t)) + h["eps"])
        self.w[i] = self.w[i] - h["lr"] * (step + h["weight_decay"] * self.w[i])


class LevanterScion(Printed):
    """Levanter's scion of matrices; what is no matrix is left as the rule has it."""

    def update(self, i: int, g: Array, h: Hyper) -> None:
        self.m[i] = (1 - h["alpha"]) * self.m[i] + h["alpha"] * g
        if g.ndim < 2:
            self.w[i] = self.w[i] - h["lr"] * self.m[i] / (math.sqrt(float((self.m[i] ** 2).mean())) + h["eps"])
            return
        matrix = self.m[i].reshape(len(g), -1)
        factor = math.sqrt(max(1, matrix.shape[0] / matrix.shape[1]))
        self.w[i] = self.w[i] - h["lr"] * factor * orthogonal(matrix, int(h["ns_steps"])).reshape(g.shape)


class LevanterNamo(Namo):
    """Levanter's namo, by Jordan's polynomials."""

    def ratio(self, ahead: Array, squares: Array, h: Hyper) -> Array:
        return np.asarray(self.size(ahead) / np.sqrt(squares + h["eps"]))


class LlmBaselinesMuonBP(WithAdam):
    """llm-baselines' MuonBP, whose momentum is a mean; its last block of columns may be smaller."""

    def matrix(self, i: int, g: Array, w: Array, h: Hyper) -> Array:
        momentum = h["momentum"] * self.m[i].reshape(g.shape) + (1 - h["momentum"]) * g
        self.m[i] = momentum.reshape(self.m[i].shape)
        whole = (self.t - 1) % int(h["period"]) == 0
        blocks = 1 if whole or g.shape[1] % int(h["blocks"]) else int(h["blocks"])
        parts = [self._scaled(part, h) for part in np.split(momentum, blocks, axis=1)]
        rate = h["lr"] if whole else h["block_lr"] * h["lr"]
        return np.asarray((1 - rate * h["weight_decay"]) * w - rate * np.hstack(parts))

    def _scaled(self, x: Array, h: Hyper) -> Array:
        return np.asarray(0.2 * math.sqrt(max(x.shape)) * orthogonal(x, int(h["ns_steps"])))


class AuthorsSRSGD(Printed):
    """The authors' SRSGD, whose count goes back to 1 where it has come to the length of a cycle."""

    def __init__(self, params: Sequence[Array]) -> None:
        super().__init__(params)
        self.count = 1
        self.before = [p.copy() for p in params]

    def step(self, grads: Sequence[Array], hyper: Hyper) -> None:
        super().step(grads, hyper)
        self.count = 1 if self.count + 1 >= hyper["restart"] else self.count + 1

    def update(self, i: int, g: Array, h: Hyper) -> None:
        after = self.w[i] - h["lr"] * g
        self.w[i] = after + (self.count - 1) / (self.count + 2) * (after - self.before[i])
        self.before[i] = after


ELSEWHERE: tuple[Fault, ...] = (
    Fault(
        printed_peer("adoptw", "timm.Adopt", TimmAdopt, _ADAM),
        "bounds by the power 0.333 of the count, and skips the decay in the first step",
        "bound by the power 1/4, as in the authors' code",
    ),
    Fault(
        printed_peer(
            "sgdw", "torch_optimizer.SGDW", TorchOptimizerSGDW, {"lr": 0.02, "momentum": 0.8, "weight_decay": 0.07}
        ),
        "takes lr*weight_decay from every weight", "take a share of each weight, as in the paper",
    ),
    Fault(
        printed_peer(
            "pid", "torch_optimizer.PID", TorchOptimizerPID,
            {"lr": 0.01, "momentum": 0.8, "integral": 2, "derivative": 3},
        ),
        "measures the second gradient's change from zero",
        "measure it from the first gradient, as in the authors' code",
    ),
    Fault(
        printed_peer(
            "transforms/lookahead(adam)", "torch_optimizer.Lookahead", TorchOptimizerLookahead,
            {"lr": 0.03, "beta1": 0.8, "beta2": 0.95, "eps": 1e-3, "k": 4, "alpha": 0.4},
        ),
        "goes back in the first of k steps, to the weights after the very first step",
        "go back in the last of k steps, to the weights at their start, as in the paper",
    ),
    Fault(
        printed_peer("adoptw", "levanter.adopt", LevanterAdopt, _ADAM),
        "does not clip, and corrects the bias of both means", "clip, and correct no mean, as in the paper",
    ),
    Fault(
        printed_peer("mars_adamw", "levanter.mars", LevanterMars, {**_ADAM, "gamma": 0.1}),
        "clips only by the norm of the whole model's corrected gradient",
        "clip the corrected gradient of each tensor, as in the paper",
    ),
    Fault(
        printed_peer(
            "scion", "levanter.scion", LevanterScion,
            {"lr": 0.02, "alpha": 0.3, "scale": 1, "ns_steps": 4, "eps": 1e-8},
        ),
        "leaves the step of a wide matrix at full length", "scale the step by sqrt(rows/cols), as in the paper",
    ),
    Fault(
        printed_peer(
            "namo", "levanter.namo", LevanterNamo, {**_MATRIX, "beta": 0.9, "eps": 1e-3, "scale": 0.3, "lr": 0.15}
        ),
        "adds eps to the second moment", "add eps to its root, as in the authors' code",
    ),
    Fault(
        printed_peer(
            "muonbp", "llm-baselines.MuonBP", LlmBaselinesMuonBP,
            {**_MATRIX, "block_lr": 0.6, "blocks": 3, "period": 4},
        ),
        "scales steps by 0.2*sqrt(max(rows, cols)) of the matrix or the block, and decays less in steps of blocks",
        "leave steps and decay as they are, as in the paper's Algorithm 1",
    ),
    Fault(
        printed_peer("srsgd", "SRSGD.SRSGD", AuthorsSRSGD, {"lr": 0.03, "restart": 7}),
        "restarts after `restarting_iter - 1` steps", "restart after the number of steps in the paper's schedule",
    ),
)  # fmt: skip


def _classes() -> dict[str, tuple[Any, Callable[[Hyper], dict[str, Any]]]]:
    """The classes that may be installed, by the names of rows, with their keywords."""
    import torch_optimizer
    from timm.optim.adopt import Adopt

    def lookahead(params: Any, k: int, alpha: float, foreach: bool, **keywords: Any) -> Any:
        return torch_optimizer.Lookahead(torch.optim.Adam(params, **keywords), k=k, alpha=alpha)

    def plain(kind: Any) -> Any:
        return lambda params, foreach, **keywords: kind(params, **keywords)

    return {
        "timm.Adopt": (Adopt, lambda h: {**adam_like(h), "decoupled": True}),
        "torch_optimizer.SGDW": (plain(torch_optimizer.SGDW), same("lr", "momentum", "weight_decay")),
        "torch_optimizer.PID": (plain(torch_optimizer.PID), same("lr", "momentum", "integral", "derivative")),
        "torch_optimizer.Lookahead": (lookahead, lambda h: {**adam_like(h), **same("k", "alpha")(h)}),
    }


def main() -> None:
    """Step installed classes beside what is written of them."""
    for name, (kind, keywords) in _classes().items():
        peer = next(fault.peer for fault in ELSEWHERE if fault.peer.theirs == name)
        trial = Trial("float64", shapes=ALL_DIMENSIONS)
        theirs = TorchRun(kind, keywords, trial.params, peer.hyper, shipped=True)
        written = peer.start(trial.params, peer.hyper)
        print(f"{name}: apart by {largest_difference(written, theirs, trial, peer.hyper).relative:.1e}")


if __name__ == "__main__":
    main()
