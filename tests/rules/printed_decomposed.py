"""Algorithms with decompositions as they are printed, in NumPy: written from the papers, and not from our rules."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from rulec.array_api import random
from rulec.language.expr.newton_schulz import coefficients_of
from tests.rules.printed import Printed
from tests.rules.runs import Array, Hyper


class WithAdam(Printed):
    """What is no matrix has AdamW's step, whose hyper-parameters may have other names.

    Where `flattened` is false, tensors of more than two dimensions are none either.
    """

    flattened = True

    def update(self, i: int, g: Array, h: Hyper) -> None:
        if g.ndim < 2 or (g.ndim > 2 and not self.flattened):
            other = {"lr": h.get("adamw_lr", h["lr"]), "eps": h.get("adamw_eps", 1e-8 if "adamw_lr" in h else h["eps"])}
            self._adamw(i, g, {**h, **other})
        else:
            shape = g.shape
            self.w[i] = self.matrix(i, g.reshape(len(g), -1), self.w[i].reshape(len(g), -1), h).reshape(shape)

    def _adamw(self, i: int, g: Array, h: Hyper) -> None:
        self.m[i] = h["beta1"] * self.m[i] + (1 - h["beta1"]) * g
        self.v[i] = h["beta2"] * self.v[i] + (1 - h["beta2"]) * g**2
        m, v = self.m[i] / (1 - h["beta1"] ** self.t), self.v[i] / (1 - h["beta2"] ** self.t)
        self.w[i] = self.w[i] - h["lr"] * (m / (np.sqrt(v) + h["eps"]) + h.get("weight_decay", 0) * self.w[i])

    def matrix(self, i: int, g: Array, w: Array, h: Hyper) -> Array:
        """One step of a matrix `w` with the gradient `g`."""
        raise NotImplementedError


class AdaGO(WithAdam):
    """Algorithm 1 of Zhang, Liu and Schaeffer (2025), with Jordan's iteration for the orthogonal factor."""

    def __init__(self, params: Sequence[Array]) -> None:
        super().__init__(params)
        self.sums: dict[int, float] = {}

    def matrix(self, i: int, g: Array, w: Array, h: Hyper) -> Array:
        momentum = h["momentum"] * self.m[i].reshape(g.shape) + (1 - h["momentum"]) * g
        self.m[i] = momentum.reshape(self.m[i].shape)
        size = min(float(np.linalg.norm(g)), h["gamma"])
        self.sums[i] = self.sums.get(i, h["start"]) + size**2
        step = max(h["eps"], h["lr"] * size / math.sqrt(self.sums[i]))
        return w - step * orthogonal(momentum, int(h["ns_steps"])) - h["lr"] * h["weight_decay"] * w


def orthogonal(x: Array, steps: int, name: str = "muon") -> Array:
    """A quintic's polynomial of the singular values: Frobenius' norm makes the largest at most 1."""
    return polynomials(x / max(float(np.linalg.norm(x)), 1e-7), coefficients_of(name, steps))


def polynomials(x: Array, table: Iterable[Sequence[float]]) -> Array:
    """Polynomials of degree five of the singular values, one after the other."""
    left, s, right = np.linalg.svd(x, full_matrices=False)
    for a, b, c in table:
        s = a * s + b * s**3 + c * s**5
    return np.asarray(left * s @ right)


class Dion2(WithAdam):
    """The authors' code of Ahn, Amsel and Langford (2025), on the chosen rows or columns alone."""

    rows_alone = False

    def matrix(self, i: int, g: Array, w: Array, h: Hyper) -> Array:
        rows, cols = g.shape
        turned = rows > cols and not self.rows_alone
        lines = self.m[i].reshape(g.shape) + g
        lines = lines.T if turned else lines
        chosen = np.argsort(-np.abs(lines).sum(1))[: math.ceil(h["fraction"] * len(lines))]
        step = np.zeros_like(lines)
        step[chosen] = self._step(i, lines[chosen], chosen, h)
        lines[chosen] *= h["mu"]
        self.m[i] = (lines.T if turned else lines).reshape(self.m[i].shape)
        step = step.T if turned else step
        return np.asarray(w - h["lr"] * (math.sqrt(rows / cols) * step + h["weight_decay"] * w))

    def _step(self, i: int, lines: Array, chosen: Array, h: Hyper) -> Array:
        return orthogonal(lines, int(h["ns_steps"]), "polar_express")


class NorDion2(Dion2):
    """The same code of the chosen rows, divided by the roots of their mean squares as NorMuon's are."""

    rows_alone = True

    def __init__(self, params: Sequence[Array]) -> None:
        super().__init__(params)
        self.squares = {i: np.zeros(len(w)) for i, w in enumerate(self.w) if w.ndim > 1}

    def _step(self, i: int, lines: Array, chosen: Array, h: Hyper) -> Array:
        o = super()._step(i, lines, chosen, h)
        v = self.squares[i]
        v[chosen] = h["beta"] * v[chosen] + (1 - h["beta"]) * (o**2).mean(1)
        u = o / (np.sqrt(v[chosen]) + h["eps"])[:, None]
        return np.asarray(u * np.linalg.norm(o) / max(np.linalg.norm(u), h["eps"]))


class Dion(WithAdam):
    """Algorithm 1 of Ahn and others (2025); it begins with our random matrix."""

    def __init__(self, params: Sequence[Array]) -> None:
        super().__init__(params)
        self.right: dict[int, Array] = {}

    def matrix(self, i: int, g: Array, w: Array, h: Hyper) -> Array:
        rows, cols = g.shape
        rank = min(int(h["rank"]), rows, cols)
        if i not in self.right:
            self.right[i] = random.normal(cols * rank, seed=0, tensor=i, draw=0, step=0).reshape(cols, rank)
        whole = self.m[i].reshape(g.shape) + g
        left = np.linalg.qr(whole @ self.right[i])[0]
        right = whole.T @ left
        self.m[i] = (whole - (1 - h["mu"]) * left @ right.T).reshape(self.m[i].shape)
        self.right[i] = right / (np.linalg.norm(right, axis=0) + h["eps"])
        return np.asarray(w - h["lr"] * (math.sqrt(rows / cols) * left @ self.right[i].T + h["weight_decay"] * w))


class Iso(WithAdam):
    """Emerging-Optimizers' isospectral step, with momentum and the retraction by QR; the singular values stay."""

    flattened = False

    def __init__(self, params: Sequence[Array]) -> None:
        super().__init__(params)
        self.parts: dict[int, list[Array]] = {}

    def matrix(self, i: int, g: Array, w: Array, h: Hyper) -> Array:
        if i not in self.parts:
            left, values, right = np.linalg.svd(w, full_matrices=False)
            self.parts[i] = [left, right.T, values, np.zeros_like(left), np.zeros_like(right.T)]
        left, right, values, slow_left, slow_right = self.parts[i]
        slow_left = h["momentum"] * slow_left + (g @ right) * values
        slow_right = h["momentum"] * slow_right + (g.T @ left) * values
        left, right = _turned(left - h["lr"] * slow_left), _turned(right - h["lr"] * slow_right)
        self.parts[i] = [left, right, values, slow_left, slow_right]
        return np.asarray((left * values) @ right.T)


def _turned(x: Array) -> Array:
    """The orthogonal factor beside a triangular one with a positive diagonal."""
    orthogonal, triangular = np.linalg.qr(x)
    return np.asarray(orthogonal * np.sign(np.diagonal(triangular)))


class SPlus(Printed):
    """Algorithm 1 of Frans, Levine and Abbeel (2025), with the weight decay of the authors' code."""

    def __init__(self, params: Sequence[Array]) -> None:
        super().__init__(params)
        self.bases: dict[int, list[Array]] = {}
        self.sums: dict[int, list[Array]] = {}

    def update(self, i: int, g: Array, h: Hyper) -> None:
        self.m[i] = h["beta1"] * self.m[i] + (1 - h["beta1"]) * g
        scale = 2 / (g.shape[0] + g.shape[1]) if g.ndim == 2 else h["other"]
        step = np.sign(self.m[i])
        if g.ndim == 2:
            left, right = self.bases.setdefault(i, [np.eye(n) for n in g.shape])
            step = left @ np.sign(left.T @ self.m[i] @ right) @ right.T
            self._rotate(i, g, h)
        moved = self.w[i] - h["lr"] * scale * step
        self.w[i] = moved * (1 - h["lr"] * scale * h["weight_decay"])

    def _rotate(self, i: int, g: Array, h: Hyper) -> None:
        old = self.sums.get(i, [np.zeros((n, n)) for n in g.shape])
        new = [g @ np.swapaxes(g, 0, 1), np.swapaxes(g, 0, 1) @ g]
        self.sums[i] = [h["beta2"] * a + (1 - h["beta2"]) * b for a, b in zip(old, new, strict=True)]
        if self.t == 1 or self.t % h["every"] == 0:
            self.bases[i] = [np.linalg.eigh(x)[1] for x in self.sums[i]]
