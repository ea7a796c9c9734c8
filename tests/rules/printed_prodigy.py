"""Prodigy with averages in place of a schedule, in NumPy: from the code of prodigy-plus-schedule-free's defaults."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tests.rules.runs import Array, Hyper


@dataclass
class _Tensor:
    """Where gradients are taken, where steps go, and what is remembered of both."""

    y: Array
    z: Array = field(init=False)
    sample: Array = field(init=False)
    s: Array = field(init=False)
    moments: list[Array] = field(init=False)

    def __post_init__(self) -> None:
        self.z = self.y.copy()
        self.moments = [np.zeros_like(self.y)]
        if self.y.ndim == 2 and max(self.y.shape) >= 32:
            self.moments = [np.zeros(n) for n in self.y.shape]

    def denominator(self, g: Array, d: float, beta2: float) -> Array:
        """The root of the second moment of `d*g`, of rows and columns where a side is long."""
        if len(self.moments) == 1:
            self.moments[0] = beta2 * self.moments[0] + (1 - beta2) * (d * g) ** 2
            return np.sqrt(self.moments[0])
        means = [((d * g) ** 2).mean(axis=axis) for axis in (1, 0)]
        self.moments = [beta2 * old + (1 - beta2) * new for old, new in zip(self.moments, means, strict=True)]
        rows, cols = self.moments
        return np.sqrt(np.outer(rows / (rows.mean() + 1e-30), cols))


class ProdigyScheduleFree:
    """The code with its defaults, but for a factored moment of tall matrices, which misses a mean there."""

    def __init__(self, params: Sequence[Array]) -> None:
        self.tensors = [_Tensor(p.copy()) for p in params]
        self.d: float | None = None
        self.weights = self.numerator = 0.0

    def step(self, grads: Sequence[Array], hyper: Hyper) -> None:
        """One step of every tensor with the same d, and then d anew."""
        stride = int(hyper["stride"])
        if self.d is None:
            self.d = hyper["d0"]
            for tensor in self.tensors:
                tensor.sample = tensor.z.ravel()[::stride].copy()
                tensor.s = np.zeros_like(tensor.sample)
        rate = self.d * hyper["lr"]
        self.weights += rate**2
        share = rate**2 / self.weights
        if hyper["decoupling_c"] > 0:
            share = min(1.0, share * (1 - hyper["beta1"]) * hyper["decoupling_c"])
        gain = total = 0.0
        for tensor, g in zip(self.tensors, grads, strict=True):
            update = self.update(tensor, g, hyper)
            sampled = self.d**2 / math.sqrt(hyper["d0"]) * g.ravel()[::stride]
            gain += float(sampled @ (tensor.sample - tensor.z.ravel()[::stride]))
            tensor.s = hyper["beta3"] * tensor.s + sampled
            total += float(np.abs(tensor.s).sum())
            tensor.y = tensor.y + share * (tensor.z - tensor.y) - rate * (1 - hyper["beta1"] * (1 - share)) * update
            tensor.z = tensor.z - rate * update
        self.grow(gain, total, hyper)

    def update(self, tensor: _Tensor, g: Array, h: Hyper) -> Array:
        """The step of one tensor, for a rate of one."""
        assert self.d is not None
        u = self.d * g / (tensor.denominator(g, self.d, h["beta2"]) + self.d * h["eps"])
        size = float(np.linalg.norm(u)) / math.sqrt(u.size)
        return np.asarray(u * max(size, 1.0) ** -0.5 + h["weight_decay"] * tensor.y)

    def grow(self, gain: float, total: float, h: Hyper) -> None:
        """The new d from the sums over all tensors."""
        assert self.d is not None
        self.numerator *= h["beta3"]
        if self.d > h["d0"] or gain > 0:
            self.numerator += gain
        if total > 0:
            d_hat = min(self.d * h["growth_rate"], self.numerator / total)
            self.d = max(self.d, d_hat * h["d_coef"])

    def params(self) -> list[Array]:
        """The parameters now, where gradients are taken."""
        return [tensor.y.copy() for tensor in self.tensors]
