"""Langevin and Hamiltonian dynamics as they are printed: the classes of `tests.rules.printed` continued.

The random numbers are ours: `tests/compiler/test_random.py` checks them against the generator's known answers.
"""

from __future__ import annotations

import math

import numpy as np

from rulec.array_api import random
from tests.rules.printed import Printed
from tests.rules.runs import Array, Hyper


class SGLD(Printed):
    """Equation 4 of Welling and Teh (2011), whose step is epsilon, with a temperature."""

    def drawn(self, i: int, g: Array) -> Array:
        """The standard normal numbers of this step."""
        return np.asarray(random.normal(g.size, seed=0, tensor=i, draw=0, step=self.t).reshape(g.shape))

    def update(self, i: int, g: Array, h: Hyper) -> None:
        epsilon = 2 * h["lr"]
        eta = math.sqrt(epsilon * h["temperature"]) * self.drawn(i, g)
        self.w[i] = self.w[i] - epsilon / 2 * g + eta


class PSGLD(SGLD):
    """Algorithm 1 of Li and others (2015) without its correction."""

    def update(self, i: int, g: Array, h: Hyper) -> None:
        self.v[i] = h["alpha"] * self.v[i] + (1 - h["alpha"]) * g**2
        scale, epsilon = 1 / (h["eps"] + np.sqrt(self.v[i])), 2 * h["lr"]
        eta = np.sqrt(epsilon * scale * h["temperature"]) * self.drawn(i, g)
        self.w[i] = self.w[i] - epsilon / 2 * scale * g + eta


class SGHMC(SGLD):
    """Equation 15 of Chen, Fox and Guestrin (2014), with a temperature."""

    def update(self, i: int, g: Array, h: Hyper) -> None:
        variance = 2 * (h["friction"] - h["noise_estimate"]) * h["lr"] * h["temperature"]
        change = -h["lr"] * g - h["friction"] * self.m[i] + math.sqrt(variance) * self.drawn(i, g)
        self.m[i] = self.m[i] + change
        self.w[i] = self.w[i] + self.m[i]
