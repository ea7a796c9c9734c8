"""Algorithms with learning rates of their own, as they are printed: the classes of `tests.rules.printed` continued."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from tests.rules.printed import Printed
from tests.rules.runs import Array, Hyper


class PAdam(Printed):
    """Algorithm 1 of Chen and others (2018), with the bias corrections of their code."""

    def __init__(self, params: Sequence[Array]) -> None:
        super().__init__(params)
        self.largest = [np.zeros_like(p) for p in params]

    def update(self, i: int, g: Array, h: Hyper) -> None:
        beta1, beta2, t = h["beta1"], h["beta2"], self.t
        self.m[i] = beta1 * self.m[i] + (1 - beta1) * g
        self.v[i] = beta2 * self.v[i] + (1 - beta2) * g * g
        self.largest[i] = np.maximum(self.largest[i], self.v[i])
        alpha = h["lr"] * math.sqrt(1 - beta2**t) / (1 - beta1**t)
        self.w[i] = self.w[i] - alpha * self.m[i] / (np.sqrt(self.largest[i]) + h["eps"]) ** (2 * h["partial"])


class Whole(Printed):
    """One side of a comparison that sees all tensors as one vector, which `update` is given."""

    def __init__(self, params: Sequence[Array]) -> None:
        self.shapes = [p.shape for p in params]
        super().__init__([np.concatenate([p.reshape(-1) for p in params])])

    def step(self, grads: Sequence[Array], hyper: Hyper) -> None:
        """One step of the vector of all tensors."""
        super().step([np.concatenate([g.reshape(-1) for g in grads])], hyper)

    def params(self) -> list[Array]:
        """The parameters in their own shapes."""
        ends = np.cumsum([math.prod(shape) for shape in self.shapes])[:-1]
        parts = np.split(self.w[0], ends)
        return [part.reshape(shape) for part, shape in zip(parts, self.shapes, strict=True)]


class AdGD(Whole):
    """Algorithm 1 of Malitsky and Mishchenko (2019): the first step has the rate given, theta begins at infinity."""

    def update(self, i: int, g: Array, h: Hyper) -> None:
        if self.t == 1:
            self.rate, self.theta = h["lr0"], math.inf
        else:
            way, change = np.linalg.norm(self.w[0] - self.w_before), np.linalg.norm(g - self.g_before)
            rate = min(math.sqrt(1 + self.theta) * self.rate, way / (2 * change)) if way and change else self.rate
            self.rate, self.theta = rate, rate / self.rate
        self.w_before, self.g_before = self.w[0], g
        self.w[0] = self.w[0] - self.rate * g


class Swats(Whole):
    """Algorithm 1 of Keskar and Socher (2017), with a tolerance apart from epsilon."""

    phase = "Adam"
    average = 0.0

    def update(self, i: int, g: Array, h: Hyper) -> None:
        beta1, beta2, t = h["beta1"], h["beta2"], self.t
        if self.phase == "SGD":
            self.momentum = beta1 * self.momentum + g
            self.w[0] = self.w[0] - (1 - beta1) * self.rate * self.momentum
            return
        self.m[0] = beta1 * self.m[0] + (1 - beta1) * g
        self.v[0] = beta2 * self.v[0] + (1 - beta2) * g * g
        alpha = h["lr"] * math.sqrt(1 - beta2**t) / (1 - beta1**t)
        moved = -alpha * self.m[0] / (np.sqrt(self.v[0]) + h["eps"])
        self.w[0] = self.w[0] + moved
        if moved @ g != 0:
            gamma = moved @ moved / -(moved @ g)
            self.average = beta2 * self.average + (1 - beta2) * gamma
            if t > 1 and abs(self.average / (1 - beta2**t) - gamma) < h["tolerance"]:
                self.phase, self.momentum, self.rate = "SGD", np.zeros_like(g), self.average / (1 - beta2**t)
