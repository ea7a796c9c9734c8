"""Low-rank algorithms as they are printed, in NumPy: written from the paper, and not from our rules."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from rulec.array_api import random
from tests.rules.printed import Printed
from tests.rules.runs import Array, Hyper


class Apollo(Printed):
    """Algorithm 1 of Zhu and others (2024), with the limited growth of norms; Adam for what is no matrix.

    The order of the limiter and the constants within it are those of the authors' code, and so is the bias correction.
    The random projections are ours: `tests/compiler/test_random.py` checks the generator against its known answers.
    """

    #: The axis of the projected gradient that one scaling factor has; None for one factor in all.
    channel: int | None = 0

    def __init__(self, params: Sequence[Array]) -> None:
        super().__init__(params)
        #: The norm of each matrix's last scaled gradient.
        self.sizes: dict[int, float] = {}

    def update(self, i: int, g: Array, h: Hyper) -> None:
        if g.ndim != 2:
            self._adam(i, g, h)
            return
        tall = g.shape[0] > g.shape[1]
        step = self._scaled(i, g.T if tall else g, h)
        self.w[i] = self.w[i] - h["lr"] * (step.T if tall else step)

    def _rank(self, h: Hyper) -> int:
        return int(h["rank"])

    def _scaled(self, i: int, g: Array, h: Hyper) -> Array:
        """The scaled gradient of a matrix that has no more rows than columns."""
        rank, beta1, beta2 = self._rank(h), h["beta1"], h["beta2"]
        drawn = random.normal(rank * g.shape[0], seed=0, tensor=i, draw=0, step=int((self.t - 1) // h["gap"]))
        low = drawn.reshape(rank, g.shape[0]) / math.sqrt(rank) @ g
        if self.t == 1:
            self.m[i], self.v[i] = np.zeros_like(low), np.zeros_like(low)
        self.m[i] = beta1 * self.m[i] + (1 - beta1) * low
        self.v[i] = beta2 * self.v[i] + (1 - beta2) * low**2
        adapted = self.m[i] / (np.sqrt(self.v[i]) + h["eps"])
        factor = np.linalg.norm(adapted, axis=self.channel) / (np.linalg.norm(low, axis=self.channel) + 1e-8)
        scaled = g * factor
        size = float(np.linalg.norm(scaled))
        if self.t > 1:
            limit = max(size / (self.sizes[i] + 1e-8), h["growth"]) / h["growth"]
            scaled, size = scaled / limit, size / limit
        self.sizes[i] = size
        correction: float = math.sqrt(1 - beta2**self.t) / (1 - beta1**self.t)
        return np.asarray(math.sqrt(h["scale"]) * correction * scaled)

    def _adam(self, i: int, g: Array, h: Hyper) -> None:
        beta1, beta2, t = h["beta1"], h["beta2"], self.t
        self.m[i] = beta1 * self.m[i] + (1 - beta1) * g
        self.v[i] = beta2 * self.v[i] + (1 - beta2) * g**2
        denominator = np.sqrt(self.v[i] / (1 - beta2**t)) + h["eps"]
        self.w[i] = self.w[i] - h["lr"] * self.m[i] / (1 - beta1**t) / denominator


class ApolloMini(Apollo):
    """Its variant of rank one, with one scaling factor for the tensor."""

    channel = None

    def _rank(self, h: Hyper) -> int:
        return 1
