"""Steps in subspaces of the gradient as they are printed, in NumPy: from the authors' code, and not from our rules."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rulec.compiler.matrix import MATRIX
from rulec.language.expr.node import Op
from tests.rules.printed import Printed
from tests.rules.printed_decomposed import WithAdam
from tests.rules.runs import Array, Hyper


def leading(x: Array, rank: int) -> Array:
    """Our left singular vectors of the largest singular values: one vector has two signs, and ours are fixed."""
    return np.asarray(MATRIX[Op.SINGULAR_VECTORS].compute(x[None], rank)[0])


class LDAdam(WithAdam):
    """The authors' code of Robert and others (2024), with power iteration, and the error beside the gradient."""

    flattened = False

    def __init__(self, params: Sequence[Array]) -> None:
        super().__init__(params)
        self.kept = [np.zeros_like(p) for p in params]
        self.spans: dict[int, Array] = {}
        self.moments: dict[int, list[Array]] = {}

    def matrix(self, i: int, g: Array, w: Array, h: Hyper) -> Array:
        grad = g + self.kept[i]
        tall = grad.shape[0] > grad.shape[1]
        step = self.wide(i, grad.T if tall else grad, h)
        self.kept[i] = self.rest.T if tall else self.rest
        w = w * (1 - h["lr"] * h["weight_decay"])
        return np.asarray(w - h["lr"] * (step.T if tall else step))

    def wide(self, i: int, grad: Array, h: Hyper) -> Array:
        """The step of a matrix of at most as many rows as columns; it leaves the new error in `rest`."""
        done, beta1, beta2 = self.t - 1, h["beta1"], h["beta2"]
        rank = min(int(h["rank"]), len(grad))
        first, second = self.moments.get(i, [np.zeros((rank, grad.shape[1]))] * 2)
        if done == 0:
            span = leading(grad, rank)
            before = np.zeros_like(span)
        else:
            before = self.spans[i]
            b = h["rho"] * (before @ first) / (1 - beta1**done) + (1 - h["rho"]) * grad
            span = np.linalg.qr(b @ (b.T @ before))[0]
        low = span.T @ grad
        change = span.T @ before
        moved = change @ first
        ratio = beta1 / (1 - beta1)
        self.rest = grad - span @ low + ratio * (before @ first) - ratio * (span @ moved)
        if done > 0:
            correction1, correction2 = 1 - beta1**done, 1 - beta2**done
            second = change**2 @ (second / correction2 - (first / correction1) ** 2) + (moved / correction1) ** 2
            second = np.abs(second * correction2)
            first = moved
        first = beta1 * first + (1 - beta1) * low
        second = beta2 * second + (1 - beta2) * low**2
        self.spans[i], self.moments[i] = span, [first, second]
        mean, square = first / (1 - beta1**self.t), second / (1 - beta2**self.t)
        return np.asarray(span @ (mean / (np.sqrt(square) + h["eps"])))


class Frugal(WithAdam):
    """The authors' code of Zmushko and others (2024) with GaLore's projection, of the rows of a square matrix."""

    flattened = False

    def __init__(self, params: Sequence[Array]) -> None:
        super().__init__(params)
        self.spans: dict[int, Array] = {}
        self.moments: dict[int, list[Array]] = {}

    def matrix(self, i: int, g: Array, w: Array, h: Hyper) -> Array:
        tall = g.shape[0] > g.shape[1]
        step = self.wide(i, g.T if tall else g, h)
        w = w * (1 - h["lr"] * h["weight_decay"])
        return np.asarray(w - h["lr"] * (step.T if tall else step))

    def wide(self, i: int, g: Array, h: Hyper) -> Array:
        """The step of a matrix of at most as many rows as columns."""
        rank = round(len(g) * h["density"])
        if not rank:
            return np.asarray(h["inactive_scale"] * np.sign(g))
        count = (self.t - 1) % int(h["gap"])
        if count == 0:
            self.spans[i] = leading(g, rank)
            self.moments[i] = [np.zeros((rank, g.shape[1]))] * 2
        span = self.spans[i]
        low = span.T @ g
        first, second = self.moments[i]
        first = h["beta1"] * first + (1 - h["beta1"]) * low
        second = h["beta2"] * second + (1 - h["beta2"]) * low**2
        self.moments[i] = [first, second]
        spread = np.sqrt(second) / np.sqrt(1 - h["beta2"] ** (count + 1)) + h["eps"]
        active = span @ (first / spread / (1 - h["beta1"] ** (count + 1)))
        return np.asarray(active + h["inactive_scale"] * np.sign(g - span @ low))


class Suds(Printed):
    """HeavyBall's SUDSAdamW, whose reflection is a whole matrix here."""

    def __init__(self, params: Sequence[Array]) -> None:
        super().__init__(params)
        self.leading: dict[int, Array] = {}

    def update(self, i: int, g: Array, h: Hyper) -> None:
        flat, first = g.reshape(-1), i not in self.leading
        if first:
            self.leading[i] = flat / max(float(np.linalg.norm(flat)), 1e-8)
            return
        q, steps = self.leading[i], self.t - 1
        way = np.eye(flat.size)[0] - q / max(float(np.linalg.norm(q)), 1e-12)
        way = way / max(float(np.linalg.norm(way)), 1e-12)
        turn = np.eye(flat.size) - 2 * np.outer(way, way)
        turned = (turn @ flat).reshape(g.shape)
        self.m[i] = h["beta1"] * self.m[i] + (1 - h["beta1"]) * turned
        self.v[i] = h["beta2"] * self.v[i] + (1 - h["beta2"]) * turned**2
        root = np.sqrt(self.v[i] / (1 - h["beta2"] ** steps)) + h["eps"]
        step = turn @ (self.m[i] / (1 - h["beta1"] ** steps) / root).reshape(-1)
        self.w[i] = self.w[i] - h["lr"] * (step.reshape(g.shape) + h["weight_decay"] * self.w[i])
        q = q + h["precond_lr"] * ((flat @ q) * flat - (flat @ q) ** 2 * q)
        self.leading[i] = q / max(float(np.linalg.norm(q)), 1e-12)
