"""Momenta as they are printed: the classes of `tests.rules.printed` continued."""

from __future__ import annotations

import numpy as np

from tests.rules.printed import Printed
from tests.rules.runs import Array, Hyper


class FSGDM(Printed):
    """Algorithm 1 of Li and others (2024), with the stages and the first step of their code."""

    def update(self, i: int, g: Array, h: Hyper) -> None:
        length = h["sigma"] // h["n_stages"]
        stage = self.t // length * length
        u = stage / (stage + h["c_scaling"] * h["sigma"])
        self.m[i] = u * self.m[i] + h["v_coefficient"] * g if self.t > 1 else g
        self.w[i] = self.w[i] - h["lr"] * self.m[i]


class GradPower(Printed):
    """Gradient descent with the powers of Wang and others (2025)."""

    def update(self, i: int, g: Array, h: Hyper) -> None:
        self.w[i] = self.w[i] - h["lr"] * np.copysign(np.abs(g) ** h["exponent"], g)
