"""Algorithms as they are printed, in NumPy: written from the papers, line by line, and not from our rules.

They stand in where no implementation that a test may install can be relied on. The letters are the papers'.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from rulec.array_api import random
from tests.rules.runs import Array, Hyper


class Printed:
    """One side of a comparison: a loop over the tensors, which all take the same step `update`."""

    def __init__(self, params: Sequence[Array]) -> None:
        self.w = [p.copy() for p in params]
        self.m = [np.zeros_like(p) for p in params]
        self.v = [np.zeros_like(p) for p in params]
        self.t = 0

    def step(self, grads: Sequence[Array], hyper: Hyper) -> None:
        """One step of every tensor."""
        self.t += 1
        for i, g in enumerate(grads):
            self.update(i, g, hyper)

    def update(self, i: int, g: Array, h: Hyper) -> None:
        """One step of the tensor with that index."""
        raise NotImplementedError

    def params(self) -> list[Array]:
        """The parameters now."""
        return [w.copy() for w in self.w]


class Lars(Printed):
    """Algorithm 1 of You, Gitman and Ginsburg (2017), its global rate given; a rate of one where a norm is zero."""

    def update(self, i: int, g: Array, h: Hyper) -> None:
        w, beta = self.w[i], h["weight_decay"]
        size, slope = math.sqrt(np.vdot(w, w)), math.sqrt(np.vdot(g, g))
        rate = 1.0
        if size and slope + beta * size:
            rate = h["trust_coefficient"] * size / (slope + beta * size)
        self.m[i] = h["momentum"] * self.m[i] + h["lr"] * rate * (g + beta * w)
        self.w[i] = w - self.m[i]


class Larc(Printed):
    """NVIDIA's LARC in its clipping form: it changes the gradients that SGD with momentum is given."""

    def update(self, i: int, g: Array, h: Hyper) -> None:
        w, beta = self.w[i], h["weight_decay"]
        size, slope = math.sqrt(np.vdot(w, w)), math.sqrt(np.vdot(g, g))
        if size and slope:
            local = h["trust_coefficient"] * size / (slope + size * beta + h["eps"])
            g = (g + beta * w) * min(local, h["lr"]) / h["lr"]
        self.m[i] = h["momentum"] * self.m[i] + g
        self.w[i] = w - h["lr"] * (g + h["momentum"] * self.m[i] if h.get("nesterov") else self.m[i])


class CautiousAdamW(Printed):
    """C-AdamW of Liang, Chen, Liu and Liu (2024), with the mask's mean bounded by 1e-3 as their code does."""

    def update(self, i: int, g: Array, h: Hyper) -> None:
        beta1, beta2, lr, t = h["beta1"], h["beta2"], h["lr"], self.t
        self.m[i] = beta1 * self.m[i] + (1 - beta1) * g
        self.v[i] = beta2 * self.v[i] + (1 - beta2) * g * g
        u = self.m[i] / (1 - beta1**t) / (np.sqrt(self.v[i] / (1 - beta2**t)) + h["eps"])
        phi = np.array(u * g > 0, dtype=np.float64)
        kept = max(phi.sum() / phi.size, 1e-3)
        self.w[i] = self.w[i] - lr / kept * phi * u - lr * h.get("weight_decay", 0) * self.w[i]


class NoisySGD(Printed):
    """Gradient descent with the noise of Neelakantan and others (2015), whose steps count from zero.

    The random numbers are ours: `tests/compiler/test_random.py` checks them against the generator's known answers.
    """

    def update(self, i: int, g: Array, h: Hyper) -> None:
        variance = h["noise_eta"] / (1 + (self.t - 1)) ** h["noise_gamma"]
        drawn = random.normal(g.size, seed=0, tensor=i, draw=0, step=self.t).reshape(g.shape)
        self.w[i] = self.w[i] - h["lr"] * (g + math.sqrt(variance) * drawn)


class CautiouslyDecayed(Printed):
    """Adam with the cautious weight decay of Chen and others (2025): elements whose step draws them to zero decay."""

    def update(self, i: int, g: Array, h: Hyper) -> None:
        beta1, beta2, lr, t = h["beta1"], h["beta2"], h["lr"], self.t
        self.m[i] = beta1 * self.m[i] + (1 - beta1) * g
        self.v[i] = beta2 * self.v[i] + (1 - beta2) * g * g
        u = self.m[i] / (1 - beta1**t) / (np.sqrt(self.v[i] / (1 - beta2**t)) + h["eps"])
        self.w[i] = self.w[i] - lr * (u + h["weight_decay"] * np.array(u * self.w[i] >= 0) * self.w[i])


class SignDecay(Printed):
    """Gradient descent with a penalty of absolute values, whose subgradient at zero is zero."""

    def update(self, i: int, g: Array, h: Hyper) -> None:
        self.w[i] = self.w[i] - h["lr"] * (g + h["l1"] * np.sign(self.w[i]))
