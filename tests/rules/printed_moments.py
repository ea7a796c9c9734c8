"""Adaptive moments of other kinds as they are printed: the classes of `tests.rules.printed` continued."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from tests.rules.printed import Printed
from tests.rules.runs import Array, Hyper


def _norm(x: Array) -> float:
    return math.sqrt(float(np.sum(x * x)))


class AdoptAtan2(Printed):
    """ADOPT with an angle, as adam-atan2-pytorch has it: the first gradient is squared and stored."""

    def update(self, i: int, g: Array, h: Hyper) -> None:
        if self.t == 1:
            self.v[i] = g * g
            return
        self.m[i] = self.m[i] + (1 - h["beta1"]) * (np.arctan2(g, h["b"] * np.sqrt(self.v[i])) - self.m[i])
        self.w[i] = self.w[i] - h["lr"] * h["a"] * self.m[i]
        self.v[i] = self.v[i] + (1 - h["beta2"]) * (g * g - self.v[i])


class Expectigrad(Printed):
    """Algorithm 1 of Daley and Amato (2020): a sum of squares over a count of gradients other than zero."""

    def __init__(self, params: Sequence[Array]) -> None:
        super().__init__(params)
        self.n = [np.zeros_like(p) for p in params]

    def update(self, i: int, g: Array, h: Hyper) -> None:
        self.v[i] = self.v[i] + g**2
        self.n[i] = self.n[i] + np.sign(g**2)
        mean = np.where(self.n[i] > 0, self.v[i] / np.maximum(self.n[i], 1), 0)
        self.m[i] = h["beta"] * self.m[i] + (1 - h["beta"]) * g / (h["eps"] + np.sqrt(mean))
        self.w[i] = self.w[i] - h["lr"] / (1 - h["beta"] ** self.t) * self.m[i]


class KourkoutasBeta(Printed):
    """The algorithm of Kassinos (2025), where every tensor is a layer."""

    def __init__(self, params: Sequence[Array]) -> None:
        super().__init__(params)
        self.ema = [0.0 for _ in params]

    def update(self, i: int, g: Array, h: Hyper) -> None:
        self.ema[i] = h["alpha"] * self.ema[i] + (1 - h["alpha"]) * _norm(g)
        raw = _norm(g) / (self.ema[i] + h["tiny_spike"])
        beta2 = h["beta2_max"] - (h["beta2_max"] - h["beta2_min"]) * raw / (1 + raw)
        if self.t <= h["warmup_steps"]:
            beta2 = (h["beta2_min"] + h["beta2_max"]) / 2
        self.m[i] = h["beta1"] * self.m[i] + (1 - h["beta1"]) * g
        self.v[i] = beta2 * self.v[i] + (1 - beta2) * g**2
        self.w[i] = self.w[i] - h["lr"] * self.m[i] / (np.sqrt(self.v[i]) + h["eps"])


class Madam(Printed):
    """Algorithm 1 of Bernstein and others (2020), with the two bounds of their code."""

    def __init__(self, params: Sequence[Array]) -> None:
        super().__init__(params)
        self.first = [float(np.sqrt(np.mean(p * p))) for p in params]

    def update(self, i: int, g: Array, h: Hyper) -> None:
        self.v[i] = h["beta"] * self.v[i] + (1 - h["beta"]) * g**2
        root = np.sqrt(self.v[i] / (1 - h["beta"] ** self.t))
        normed = np.where(root > 0, g / np.where(root > 0, root, 1), 0).clip(-h["g_bound"], h["g_bound"])
        largest = h["p_scale"] * self.first[i]
        self.w[i] = (self.w[i] * np.exp(-h["lr"] * normed * np.sign(self.w[i]))).clip(-largest, largest)


class HAdam(Printed):
    """Algorithm 1 of Jiang and others (2019)."""

    def update(self, i: int, g: Array, h: Hyper) -> None:
        beta1, beta2, k, t = h["beta1"], h["beta2"], h["order"], self.t
        self.m[i] = beta1 * self.m[i] + (1 - beta1) * g
        self.v[i] = beta2 * self.v[i] + (1 - beta2) * g**k
        rate = h["lr"] * (1 - beta2**t) ** (1 / k) / (1 - beta1**t)
        self.w[i] = self.w[i] - rate * self.m[i] / (self.v[i] ** (1 / k) + h["eps"])


class NosAdam(Printed):
    """NosAdam-HH of Huang, Wang and Dong (2018): the sum of all weights is formed anew in every step."""

    def update(self, i: int, g: Array, h: Hyper) -> None:
        weights = [k ** -h["gamma"] for k in range(1, self.t + 1)]
        beta2 = sum(weights[:-1]) / sum(weights)
        self.m[i] = h["beta1"] * self.m[i] + (1 - h["beta1"]) * g
        self.v[i] = beta2 * self.v[i] + (1 - beta2) * g**2
        m_hat = self.m[i] / (1 - h["beta1"] ** self.t)
        self.w[i] = self.w[i] - h["lr"] * m_hat / (np.sqrt(self.v[i]) + h["eps"])


class InnaProp(Printed):
    """Algorithm 1 of Bolte and others (2024)."""

    def update(self, i: int, g: Array, h: Hyper) -> None:
        alpha, beta, sigma, lr = h["alpha"], h["beta"], h["sigma"], h["lr"]
        if self.t == 1:
            self.m[i] = (1 - alpha * beta) * self.w[i]
        theta = self.w[i] - lr * h["weight_decay"] * self.w[i]
        self.v[i] = sigma * self.v[i] + (1 - sigma) * g**2
        v_hat = self.v[i] / (1 - sigma**self.t)
        self.m[i] = self.m[i] * (1 - lr / beta) + lr * (1 / beta - alpha) * theta
        inertia = theta * (1 + lr * (1 - alpha * beta) / (beta - lr)) - self.m[i] * lr / (beta - lr)
        self.w[i] = inertia - lr * beta * g / (np.sqrt(v_hat) + h["eps"])


class EAdam(Printed):
    """Algorithm 2 of Yuan and Gao (2020)."""

    def update(self, i: int, g: Array, h: Hyper) -> None:
        beta1, beta2, t = h["beta1"], h["beta2"], self.t
        self.m[i] = beta1 * self.m[i] + (1 - beta1) * g
        self.v[i] = beta2 * self.v[i] + (1 - beta2) * g**2
        self.v[i] = self.v[i] + h["eps"]
        self.w[i] = self.w[i] - h["lr"] * (self.m[i] / (1 - beta1**t)) / np.sqrt(self.v[i] / (1 - beta2**t))


class AGD(Printed):
    """Algorithm 1 of Yue and others (2023)."""

    def __init__(self, params: Sequence[Array]) -> None:
        super().__init__(params)
        self.corrected = [np.zeros_like(p) for p in params]

    def update(self, i: int, g: Array, h: Hyper) -> None:
        beta1, beta2, t = h["beta1"], h["beta2"], self.t
        self.m[i] = beta1 * self.m[i] + (1 - beta1) * g
        s = self.m[i] / (1 - beta1**t) - self.corrected[i]
        self.corrected[i] = self.m[i] / (1 - beta1**t)
        self.v[i] = beta2 * self.v[i] + (1 - beta2) * s**2
        root = math.sqrt(1 - beta2**t)
        rate = h["lr"] * root / (1 - beta1**t)
        self.w[i] = self.w[i] - rate * self.m[i] / np.maximum(np.sqrt(self.v[i]), h["switch"] * root)


class ACClip(Printed):
    """The algorithm ACClip of Zhang and others (2019)."""

    def update(self, i: int, g: Array, h: Hyper) -> None:
        self.m[i] = h["beta1"] * self.m[i] + (1 - h["beta1"]) * g
        self.v[i] = h["beta2"] * self.v[i] + (1 - h["beta2"]) * np.abs(g) ** h["alpha"]
        bound = self.v[i] ** (1 / h["alpha"])
        self.w[i] = self.w[i] - h["lr"] * np.minimum(bound / (np.abs(self.m[i]) + h["eps"]), 1) * self.m[i]


class ScAdagrad(Printed):
    """SC-Adagrad, algorithm 3 of Mukkamala and Hein (2017)."""

    def update(self, i: int, g: Array, h: Hyper) -> None:
        self.v[i] = self.v[i] + g**2
        delta = h["xi2"] * np.exp(-h["xi1"] * self.v[i])
        self.w[i] = self.w[i] - h["lr"] * g / (self.v[i] + delta)


class SGDF(Printed):
    """Algorithm 1 of Yao, Zhang and Li (2023), with the correction and the power of their code."""

    def update(self, i: int, g: Array, h: Hyper) -> None:
        beta1, beta2, t = h["beta1"], h["beta2"], self.t
        self.m[i] = beta1 * self.m[i] + (1 - beta1) * g
        self.v[i] = beta2 * self.v[i] + (1 - beta2) * (g - self.m[i]) ** 2
        m_hat = self.m[i] / (1 - beta1**t)
        s_hat = self.v[i] / ((1 + beta1) * (1 - beta2**t) / ((1 - beta1) * (1 - beta1 ** (2 * t))))
        gain = (s_hat / (s_hat + (g - m_hat) ** 2 + h["eps"])) ** h["gamma"]
        self.w[i] = self.w[i] - h["lr"] * ((1 - gain) * m_hat + gain * g)


class LionK(Printed):
    """Lion-K of Chen and others (2023), whose K is the norm of an order; its gradient is written with powers."""

    def update(self, i: int, g: Array, h: Hyper) -> None:
        c = h["beta1"] * self.m[i] + (1 - h["beta1"]) * g
        self.m[i] = h["beta2"] * self.m[i] + (1 - h["beta2"]) * g
        size = float(np.sum(np.abs(c) ** h["order"])) ** (1 / h["order"])
        slope = np.sign(c) * np.abs(c) ** (h["order"] - 1) / (size ** (h["order"] - 1) if size else 1)
        self.w[i] = self.w[i] - h["lr"] * (slope + h["weight_decay"] * self.w[i])


class GrokAdamW(Printed):
    """The formulas of grokadamw 0.1.2, whose tensors are all of one group."""

    def __init__(self, params: Sequence[Array]) -> None:
        super().__init__(params)
        self.slow = [np.zeros_like(p) for p in params]

    def update(self, i: int, g: Array, h: Hyper) -> None:
        g = g * min(1.0, h["clip"] / (_norm(g) + 1e-6))
        alpha = h["alpha"] * math.exp(-h["signal_decay"] * h["signal"])
        self.slow[i] = alpha * self.slow[i] + (1 - alpha) * g
        g = g + h["lamb"] * self.slow[i]
        beta1 = h["beta1"] * (1 - h["gamma"]) ** i
        self.m[i] = beta1 * self.m[i] + (1 - beta1) * g
        self.v[i] = h["beta2"] * self.v[i] + (1 - h["beta2"]) * g**2
        rate = h["lr"] * math.sqrt(1 - h["beta2"] ** self.t) / (1 - h["beta1"] ** self.t)
        self.w[i] = self.w[i] * (1 - h["lr"] * h["weight_decay"]) - rate * self.m[i] / (np.sqrt(self.v[i]) + h["eps"])
