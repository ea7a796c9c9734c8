"""Relatives of well-known algorithms as they are printed: the classes of `tests.rules.printed` continued."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from tests.rules.printed import Printed
from tests.rules.printed_adaptive import Whole
from tests.rules.runs import Array, Hyper


def _norm(x: Array) -> float:
    return math.sqrt(float(np.sum(x * x)))


class FtrlProximal(Printed):
    """TensorFlow's Ftrl, whose accumulators begin at a number and whose gradients have a shrinkage of their own."""

    def update(self, i: int, g: Array, h: Hyper) -> None:
        if self.t == 1:
            self.v[i] = np.full_like(g, h["initial"])
        lr, power = h["lr"], -h["lr_power"]
        l2 = h["lambda2"] + h["beta"] / (2 * lr)
        total = self.v[i] + g**2
        sigma = (total**power - self.v[i] ** power) / lr
        self.m[i] = self.m[i] + g + 2 * h["shrinkage"] * self.w[i] - sigma * self.w[i]
        quadratic = total**power / lr + 2 * l2
        small = np.abs(self.m[i]) <= h["lambda1"]
        self.w[i] = np.where(small, 0, (np.sign(self.m[i]) * h["lambda1"] - self.m[i]) / quadratic)
        self.v[i] = total


class AdamD(Printed):
    """Adam with its second moment corrected alone (St John 2021)."""

    def update(self, i: int, g: Array, h: Hyper) -> None:
        self.m[i] = h["beta1"] * self.m[i] + (1 - h["beta1"]) * g
        self.v[i] = h["beta2"] * self.v[i] + (1 - h["beta2"]) * g**2
        self.w[i] = self.w[i] - h["lr"] * self.m[i] / (np.sqrt(self.v[i] / (1 - h["beta2"] ** self.t)) + h["eps"])


class AdamAtan2(Printed):
    """Adam with an angle in place of its quotient (Everett and others 2024)."""

    def update(self, i: int, g: Array, h: Hyper) -> None:
        self.m[i] = h["beta1"] * self.m[i] + (1 - h["beta1"]) * g
        self.v[i] = h["beta2"] * self.v[i] + (1 - h["beta2"]) * g**2
        m_hat, v_hat = self.m[i] / (1 - h["beta1"] ** self.t), self.v[i] / (1 - h["beta2"] ** self.t)
        self.w[i] = self.w[i] - h["lr"] * h["a"] * np.arctan2(m_hat, h["b"] * np.sqrt(v_hat))


class AdaX(Printed):
    """Algorithm 2 of Li and others (2020), whose second moment grows without bound."""

    def update(self, i: int, g: Array, h: Hyper) -> None:
        growth = 1 + h["beta2"]
        self.m[i] = h["beta1"] * self.m[i] + (1 - h["beta1"]) * g
        self.v[i] = growth * self.v[i] + h["beta2"] * g**2
        self.w[i] = self.w[i] - h["lr"] * self.m[i] / (np.sqrt(self.v[i] / (growth**self.t - 1)) + h["eps"])


class AdaMomentum(Printed):
    """The algorithm of Wang and others (2021): eps is added to the second moment, and nowhere else."""

    def update(self, i: int, g: Array, h: Hyper) -> None:
        beta1, beta2, t = h["beta1"], h["beta2"], self.t
        self.m[i] = beta1 * self.m[i] + (1 - beta1) * g
        self.v[i] = beta2 * self.v[i] + (1 - beta2) * self.m[i] ** 2 + h["eps"]
        self.w[i] = self.w[i] - h["lr"] * (self.m[i] / (1 - beta1**t)) / np.sqrt(self.v[i] / (1 - beta2**t))


class Debiased(Printed):
    """Rules of HeavyBall: running means whose weights are 1 at first, and denominators of eps at least."""

    def means(self, i: int, g: Array, h: Hyper) -> Array:
        """Takes a gradient into both means; gives the denominator."""
        first, second = ((1 - h[beta]) / (1 - h[beta] ** self.t) for beta in ("beta1", "beta2"))
        self.v[i] = self.v[i] + second * (g**2 - self.v[i])
        sigma = np.maximum(np.sqrt(self.v[i]), h["eps"])
        self.m[i] = self.m[i] + first * (g / sigma - self.m[i])
        return sigma


class UnscaledAdamW(Debiased):
    """HeavyBall's UnscaledAdamW."""

    def update(self, i: int, g: Array, h: Hyper) -> None:
        sigma = self.means(i, g, h)
        self.w[i] = self.w[i] * (1 - h["lr"] * h["weight_decay"]) - h["lr"] * self.m[i] * sigma


class MsamLaProp(Debiased):
    """HeavyBall's MSAMLaProp: the parameters it shows are moved along the momentum."""

    def __init__(self, params: Sequence[Array]) -> None:
        super().__init__(params)
        self.z = [p.copy() for p in params]

    def update(self, i: int, g: Array, h: Hyper) -> None:
        self.means(i, g, h)
        self.z[i] = self.z[i] * (1 - h["lr"] * h["weight_decay"]) - h["lr"] * self.m[i]
        self.w[i] = self.z[i] - h["rho"] * self.m[i] / max(_norm(self.m[i]), 1e-8)


class SignLaProp(Printed):
    """HeavyBall's SignLaProp: the signs of LaProp's step, at its length."""

    def update(self, i: int, g: Array, h: Hyper) -> None:
        self.v[i] = h["beta2"] * self.v[i] + (1 - h["beta2"]) * g**2
        sigma = np.sqrt(self.v[i] / (1 - h["beta2"] ** self.t)) + h["eps"]
        self.m[i] = h["beta1"] * self.m[i] + (1 - h["beta1"]) * g / sigma
        step = self.m[i] / (1 - h["beta1"] ** self.t)
        signs = np.sign(step)
        self.w[i] = self.w[i] - h["lr"] * signs * (_norm(step) / max(_norm(signs), 1e-6))


class _Adam(Printed):
    def direction(self, i: int, g: Array, h: Hyper) -> Array:
        """Adam's step without the learning rate."""
        beta1, beta2, t = h["beta1"], h["beta2"], self.t
        self.m[i] = beta1 * self.m[i] + (1 - beta1) * g
        self.v[i] = beta2 * self.v[i] + (1 - beta2) * g**2
        return np.asarray(self.m[i] / (1 - beta1**t) / (np.sqrt(self.v[i] / (1 - beta2**t)) + h["eps"]))


class LambC(_Adam):
    """LAMB with its trust ratio bounded by one, of Fong, Chen and Chen (2020)."""

    def update(self, i: int, g: Array, h: Hyper) -> None:
        u = self.direction(i, g, h) + h["weight_decay"] * self.w[i]
        size, length = _norm(self.w[i]), _norm(u)
        self.w[i] = self.w[i] - h["lr"] * (min(size / length, 1) if size and length else 1) * u


class HyperballAdam(_Adam):
    """HeavyBall's HyperBallAdamW around Adam: matrices keep the norm they began with, anything else has AdamW."""

    def __init__(self, params: Sequence[Array]) -> None:
        super().__init__(params)
        self.radius = [_norm(p) for p in params]

    def update(self, i: int, g: Array, h: Hyper) -> None:
        u = self.direction(i, g, h)
        if u.ndim < 2:
            self.w[i] = self.w[i] - h["lr"] * (u + h["weight_decay"] * self.w[i])
            return
        moved = self.w[i] - h["lr"] * u / max(_norm(u), 1e-12) * self.radius[i]
        self.w[i] = moved * (self.radius[i] / max(_norm(moved), 1e-12))


class AdaLomo(Printed):
    """Algorithm 1 of Lv and others (2023), with the means, the decay of 1 - t**-decay and the bounds of their code."""

    def __init__(self, params: Sequence[Array]) -> None:
        super().__init__(params)
        self.rows = [np.zeros(p.shape[:-1]) for p in params]
        self.cols = [np.zeros((*p.shape[:-2], *p.shape[-1:])) for p in params]

    def update(self, i: int, g: Array, h: Hyper) -> None:
        beta, s = 1 - self.t ** -h["decay"], g**2 + h["eps1"]
        if g.ndim > 1:
            self.rows[i] = beta * self.rows[i] + (1 - beta) * s.mean(-1)
            self.cols[i] = beta * self.cols[i] + (1 - beta) * s.mean(-2)
            shares = self.rows[i] / self.rows[i].mean(-1, keepdims=True)
            u = g / np.sqrt(shares[..., :, None] * self.cols[i][..., None, :])
        else:
            self.v[i] = beta * self.v[i] + (1 - beta) * s
            u = g / np.sqrt(self.v[i])
        u = u / max(_norm(u) / math.sqrt(u.size) / h["d"], 1)
        lr = h["lr"] * max(_norm(self.w[i]) / math.sqrt(u.size), h["eps2"])
        self.w[i] = self.w[i] * (1 - lr * h["weight_decay"]) - lr * u


class AdaGradNorm(Whole):
    """Algorithm 1 of Ward, Wu and Bottou (2018)."""

    def update(self, i: int, g: Array, h: Hyper) -> None:
        if self.t == 1:
            self.b = h["b0"]
        self.b = math.hypot(self.b, float(np.linalg.norm(g)))
        self.w[0] = self.w[0] - h["lr"] / self.b * g
