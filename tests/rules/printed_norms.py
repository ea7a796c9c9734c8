"""Kin of Muon with steps by norms or roots, in NumPy: from papers and authors' code, and not from our rules."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from tests.rules.printed import Printed
from tests.rules.printed_decomposed import WithAdam, orthogonal
from tests.rules.runs import Array, Hyper


class Namo(WithAdam):
    """The authors' code of Zhang, Liu and Schaeffer (2026), without the 1e-12 that it adds to a denominator."""

    def __init__(self, params: Sequence[Array]) -> None:
        super().__init__(params)
        self.squares: dict[int, Array] = {}

    def matrix(self, i: int, g: Array, w: Array, h: Hyper) -> Array:
        beta1, beta2 = h["momentum"], h["beta"]
        momentum = beta1 * self.m[i].reshape(g.shape) + (1 - beta1) * g
        self.m[i] = momentum.reshape(self.m[i].shape)
        ahead = (1 - beta1) * g + beta1 * momentum
        self.squares[i] = beta2 * self.squares.get(i, np.zeros(())) + (1 - beta2) * self.size(g) ** 2
        correction = math.sqrt(1 - beta2**self.t) / (1 - beta1**self.t)
        ratio = self.held(self.ratio(ahead, self.squares[i], h), h)
        rate = h["lr"] * correction * ratio
        longer = h["scale"] * math.sqrt(max(g.shape))
        kept = np.maximum(1 - h["weight_decay"] * np.minimum(rate, 1), 0)
        return np.asarray(kept * w - np.minimum(longer * rate, 1) * orthogonal(ahead, int(h["ns_steps"])))

    def size(self, x: Array) -> Array:
        """The norm that a step size is made of."""
        return np.asarray(np.linalg.norm(x))

    def ratio(self, ahead: Array, squares: Array, h: Hyper) -> Array:
        """The norm of the momentum over the root of the mean square of norms of gradients."""
        return np.asarray(self.size(ahead) / (np.sqrt(squares) + h["eps"]))

    def held(self, ratio: Array, h: Hyper) -> Array:
        """The ratio of norms within its bounds."""
        return ratio


class NamoD(Namo):
    """The diagonal form of the same code: a norm for each column, held near the mean of all."""

    def size(self, x: Array) -> Array:
        return np.asarray(np.sqrt((x * x).sum(0)))

    def held(self, ratio: Array, h: Hyper) -> Array:
        return np.clip(ratio, h["clamp"] * ratio.mean(), ratio.mean() / h["clamp"])


class Rmnp(WithAdam):
    """The authors' code of Deng and others (2026): rows of Nesterov's momentum, of length 1 each."""

    def matrix(self, i: int, g: Array, w: Array, h: Hyper) -> Array:
        momentum = h["momentum"] * self.m[i].reshape(g.shape) + g
        self.m[i] = momentum.reshape(self.m[i].shape)
        ahead = g + h["momentum"] * momentum
        rows = np.stack([row / max(math.sqrt(float(row @ row)), h["eps"]) for row in ahead])
        factor = math.sqrt(max(1, g.shape[0] / g.shape[1]))
        return np.asarray((1 - h["lr"] * h["weight_decay"]) * w - h["lr"] * factor * rows)


class MuonRemez(WithAdam):
    """The limit that levanter's iteration goes to: a singular value s is s/(s**2 + eps)**(1/4), of norm 1."""

    def matrix(self, i: int, g: Array, w: Array, h: Hyper) -> Array:
        momentum = h["momentum"] * self.m[i].reshape(g.shape) + g
        self.m[i] = momentum.reshape(self.m[i].shape)
        ahead = g + h["momentum"] * momentum
        size = math.sqrt(float((ahead * ahead).sum())) or 1.0
        left, s, right = np.linalg.svd(ahead / size, full_matrices=False)
        step = (left * (s / (s**2 + h["eps"]) ** 0.25)) @ right * math.sqrt(size)
        factor = math.sqrt(max(1, g.shape[0] / g.shape[1]))
        return np.asarray((1 - h["lr"] * h["weight_decay"]) * w - h["lr"] * factor * step)


class _Sphere(Printed):
    """Steps along the sphere of the norm at the start, with gradients that are tangent to it; vectors have Adam."""

    def update(self, i: int, g: Array, h: Hyper) -> None:
        w = self.w[i]
        if w.ndim < 2:
            self._moments(i, g, h)
            self.w[i] = w - h["adam_lr"] * self._adam(i, h)
            return
        moved = w - h["lr"] * self.direction(i, tangent(g, w), h)
        self.w[i] = moved * (np.linalg.norm(w) / np.linalg.norm(moved))
        self.m[i] = tangent(self.m[i], self.w[i])

    def direction(self, i: int, r: Array, h: Hyper) -> Array:
        """The step of a matrix without the rate, by the tangent gradient."""
        raise NotImplementedError

    def _moments(self, i: int, g: Array, h: Hyper) -> None:
        self.m[i] = h["beta1"] * self.m[i] + (1 - h["beta1"]) * g
        self.v[i] = h["beta2"] * self.v[i] + (1 - h["beta2"]) * g**2

    def _adam(self, i: int, h: Hyper) -> Array:
        m, v = self.m[i] / (1 - h["beta1"] ** self.t), self.v[i] / (1 - h["beta2"] ** self.t)
        return np.asarray(m / (np.sqrt(v) + h["eps"]))


def tangent(x: Array, w: Array) -> Array:
    """The part of `x` that is orthogonal to `w`."""
    unit = w / np.linalg.norm(w)
    return np.asarray(x - np.vdot(x, unit) * unit)


class AdamHR(_Sphere):
    """Levanter's code: Adam's step by moments of tangent gradients."""

    def direction(self, i: int, r: Array, h: Hyper) -> Array:
        self._moments(i, r, h)
        return self._adam(i, h)


class MuonHR(_Sphere):
    """Levanter's code: the orthogonal factor of Nesterov's momentum of tangent gradients, by You's polynomials."""

    def direction(self, i: int, r: Array, h: Hyper) -> Array:
        self.m[i] = h["momentum"] * self.m[i] + r
        ahead = (r + h["momentum"] * self.m[i]).reshape(len(r), -1)
        return orthogonal(ahead, int(h["ns_steps"]), "quintic").reshape(r.shape)


class MuonSphere(WithAdam):
    """MuonSphere by levanter's code, with the largest singular value of the weights instead of an estimate."""

    def matrix(self, i: int, g: Array, w: Array, h: Hyper) -> Array:
        momentum = h["momentum"] * self.m[i].reshape(g.shape) + g
        self.m[i] = momentum.reshape(self.m[i].shape)
        ahead = g + h["momentum"] * momentum
        radius = h["radius"] * math.sqrt(w.shape[0] / w.shape[1])
        o = orthogonal(ahead, int(h["polar_steps"]), "polar_express")
        return np.asarray(w * (radius / np.linalg.svd(w)[1][0]) - h["lr"] * radius * o)

    def _adamw(self, i: int, g: Array, h: Hyper) -> None:
        super()._adamw(i, g, {**h, "lr": h["adam_lr"], "eps": h["eps"]})
