"""Whitened, orthogonal and projected momentum as it is printed, in NumPy: from the papers, and not from our rules."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rulec.compiler.matrix import MATRIX
from rulec.language.expr.node import Op
from tests.rules.printed_decomposed import WithAdam
from tests.rules.runs import Array, Hyper


def polar(x: Array, steps: int) -> Array:
    """You's quintics, by their polynomials of the singular values: Frobenius' norm makes the largest at most 1."""
    quintics = [
        (4.0848, -6.8946, 2.9270), (3.9505, -6.3029, 2.6377), (3.7418, -5.5913, 2.3037), (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ]  # fmt: skip
    left, s, right = np.linalg.svd(x / max(float(np.linalg.norm(x)), 1e-7), full_matrices=False)
    for a, b, c in quintics[:steps]:
        s = a * s + b * s**3 + c * s**5
    return np.asarray(left * s @ right)


class PolarGrad(WithAdam):
    """Polar gradients of Lau, Long and Su (2025), with momentum before the polar decomposition."""

    flattened = False

    def matrix(self, i: int, g: Array, w: Array, h: Hyper) -> Array:
        self.m[i] = h["momentum"] * self.m[i] + (1 - h["momentum"]) * g
        factor = polar(self.m[i], int(h["ns_steps"]))
        return w - h["lr"] * (np.trace(self.m[i].T @ factor) * factor + h["weight_decay"] * w)


class Spel(WithAdam):
    """SPEL of Yang and Lai (2026), with the gradient itself, and decay before the projection."""

    flattened = False

    def matrix(self, i: int, g: Array, w: Array, h: Hyper) -> Array:
        self.m[i] = h["momentum"] * self.m[i] + (1 - h["momentum"]) * g
        steps = int(h["ns_steps"])
        return polar((1 - h["lr"] * h["weight_decay"]) * w - h["lr"] * polar(self.m[i], steps), steps)


class Whitened(WithAdam):
    """Covariances of both sides, each whitened by the other, of Lin and others (2025)."""

    def __init__(self, params: Sequence[Array]) -> None:
        super().__init__(params)
        self.sides: dict[int, list[Array]] = {}
        self.bases: dict[int, list[Array]] = {}
        self.m = [m.reshape(len(m), -1) if m.ndim > 1 else m for m in self.m]
        self.v = [v.reshape(len(v), -1) if v.ndim > 1 else v for v in self.v]

    def eigenvalues(self, i: int, h: Hyper) -> list[Array]:
        """The diagonals of the covariances in their bases, bounded from below."""
        pairs = zip(self.sides[i], self.bases[i], strict=True)
        return [np.maximum(np.einsum("ji,jk,ki->i", q, s, q), h["eps"]) for s, q in pairs]

    def follow(self, i: int, g: Array, weight: float, h: Hyper) -> None:
        """One step of both covariances, by the inverses of those before; `weight` is that of the new one."""
        left, right = (q / d @ q.T for q, d in zip(self.bases[i], self.eigenvalues(i, h), strict=True))
        news = [g @ right @ g.T / g.shape[1], g.T @ left @ g / g.shape[0]]
        self.sides[i] = [(1 - weight) * s + weight * new for s, new in zip(self.sides[i], news, strict=True)]

    def turn(self, i: int) -> None:
        """One iteration of both bases towards the eigenvectors."""
        self.bases[i] = [_orthonormal(s @ q) for s, q in zip(self.sides[i], self.bases[i], strict=True)]


def _orthonormal(x: Array) -> Array:
    """The columns one after the other by Gram and Schmidt, twice against rounding."""
    columns: list[Array] = []
    for column in x.T:
        for _ in range(2):
            for done in columns:
                column = column - (done @ column) * done
            column = column / np.linalg.norm(column)
        columns.append(column)
    return np.stack(columns, axis=1)


class KLShampoo(Whitened):
    """KL-Shampoo of Lin and others (2025) with QR factorizations, and momentum."""

    def matrix(self, i: int, g: Array, w: Array, h: Hyper) -> Array:
        if self.t == 1:
            self.sides[i] = [h["initial"] * np.eye(n) for n in g.shape]
            self.bases[i] = [np.eye(n) for n in g.shape]
        self.m[i] = h["beta1"] * self.m[i] + (1 - h["beta1"]) * g
        left, right = (q / np.sqrt(d) @ q.T for q, d in zip(self.bases[i], self.eigenvalues(i, h), strict=True))
        moved = w - h["lr"] * left @ self.m[i] @ right
        self.follow(i, g, 1 - h["beta2"], h)
        if self.t % h["every"] == 0:
            self.turn(i)
        return np.asarray(moved)


class KLSOAP(Whitened):
    """KL-SOAP of Lin and others (2025): Adam in these bases, of which the first gradient's are eigenvectors.

    They are ours: covariances of one gradient have less than full rank.
    """

    def matrix(self, i: int, g: Array, w: Array, h: Hyper) -> Array:
        if self.t == 1:
            self.sides[i] = [g @ g.T, g.T @ g]
            self.bases[i] = [MATRIX[Op.EIGH].compute(-s[None])[0] for s in self.sides[i]]
            return w
        left, right = self.bases[i]
        steps = self.t - 1
        self.m[i] = h["beta1"] * self.m[i] + (1 - h["beta1"]) * g
        self.v[i] = h["beta2"] * self.v[i] + (1 - h["beta2"]) * (left.T @ g @ right) ** 2
        sigma = np.sqrt(self.v[i]) + h["eps"]
        size = np.sqrt(1 - h["beta2"] ** steps) / (1 - h["beta1"] ** steps)
        moved = w - h["lr"] * size * left @ (left.T @ self.m[i] @ right / sigma) @ right.T
        self.follow(i, g, (1 - h["beta2"]) / (1 - h["beta2"] ** self.t), h)
        if steps % h["every"] == 0:
            self.turn(i)
        return np.asarray(moved)


class Moso(WithAdam):
    """MOSO of NVIDIA's Emerging Optimizers: the shorter side of the momentum has a basis."""

    flattened = False

    def __init__(self, params: Sequence[Array]) -> None:
        super().__init__(params)
        self.side: dict[int, Array] = {}
        self.basis: dict[int, Array] = {}

    def matrix(self, i: int, g: Array, w: Array, h: Hyper) -> Array:
        self.m[i] = h["momentum"] * self.m[i] + (1 - h["momentum"]) * g
        tall = g.shape[0] > g.shape[1]
        m = self.m[i].T if tall else self.m[i]
        weight = (1 - h["beta"]) / (1 - h["beta"] ** self.t)
        self.side[i] = (1 - weight) * self.side.get(i, 0.0) + weight * m @ m.T
        first = self.t == 1
        self.basis[i] = (
            np.linalg.eigh(self.side[i])[1][:, ::-1] if first else _orthonormal(self.side[i] @ self.basis[i])
        )
        turned = self.basis[i].T @ m
        v = h["beta2"] * (self.v[i].T if tall else self.v[i]) + (1 - h["beta2"]) * turned**2
        self.v[i] = v.T if tall else v
        step = self.basis[i] @ (turned / (np.sqrt(v) + h["eps"]))
        return np.asarray(w - h["lr"] * ((step.T if tall else step) + h["weight_decay"] * w))
