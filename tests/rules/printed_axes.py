"""Rules with a matrix for each axis of a tensor as they are printed, by unfoldings and Kronecker products."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from rulec.compiler.matrix import MATRIX
from rulec.language.expr.node import Op
from tests.rules.printed_decomposed import WithAdam
from tests.rules.runs import Array, Hyper


def unfolded(x: Array, axis: int) -> Array:
    """The tensor as a matrix with the indices of an axis as its rows, and the other axes in their order."""
    return np.moveaxis(x, axis, 0).reshape(x.shape[axis], -1)


def along(x: Array, matrices: Sequence[Array]) -> Array:
    """The tensor with every axis multiplied by the transpose of its matrix: a product with their Kronecker product."""
    product: Array = functools.reduce(np.kron, matrices)
    return (product.T @ x.reshape(-1)).reshape(x.shape)


class WithAxes(WithAdam):
    """Tensors of two dimensions or more have a matrix for each axis."""

    def update(self, i: int, g: Array, h: Hyper) -> None:
        if g.ndim < 2:
            super().update(i, g, h)
        else:
            self.w[i] = self.w[i] - h["lr"] * self.tensor(i, g, h)

    def tensor(self, i: int, g: Array, h: Hyper) -> Array:
        """The direction of a step of the tensor with that index."""
        raise NotImplementedError


class DASHAxes(WithAxes):
    """DASH of Modoranu and others (2026), with the factors and roots of Distributed Shampoo for more dimensions."""

    def __init__(self, params: Sequence[Array]) -> None:
        super().__init__(params)
        self.sums = [[np.zeros((n, n)) for n in p.shape] for p in params]
        self.roots = [[np.eye(n) for n in p.shape] for p in params]

    def tensor(self, i: int, g: Array, h: Hyper) -> Array:
        self.m[i] = h["beta1"] * self.m[i] + (1 - h["beta1"]) * g
        self.v[i] = h["beta3"] * self.v[i] + (1 - h["beta3"]) * g**2
        corrected = self.v[i] / (1 - h["beta3"] ** self.t)
        adam = self.m[i] / (1 - h["beta1"] ** self.t) / (np.sqrt(corrected) + h["eps"])
        for k, total in enumerate(self.sums[i]):
            total *= h["beta2"]
            total += (1 - h["beta2"]) * unfolded(g, k) @ unfolded(g, k).T
            if self.t == 1 or self.t % h["every"] == 0:
                self.roots[i][k] = self._root(total, g.ndim, h["matrix_eps"])
        turned = along(self.m[i], self.roots[i])
        return np.asarray(turned * np.linalg.norm(adam) / (np.linalg.norm(turned) + 1e-16))

    def _root(self, x: Array, dimensions: int, eps: float) -> Array:
        """The inverse root, with a small number added before the decomposition and after it."""
        values, vectors = np.linalg.eigh(x + eps * np.eye(len(x)))
        values = values - min(values.min(), 0) + eps
        return np.asarray(vectors * values ** (-1 / (2 * dimensions)) @ vectors.T)


class KLSOAPAxes(WithAxes):
    """KL-SOAP of Lin and others (2025): the covariance of an axis is of the gradient whitened along the others.

    The first bases are ours: covariances of one gradient have less than full rank.
    """

    def __init__(self, params: Sequence[Array]) -> None:
        super().__init__(params)
        self.sides: dict[int, list[Array]] = {}
        self.bases: dict[int, list[Array]] = {}

    def tensor(self, i: int, g: Array, h: Hyper) -> Array:
        axes = range(g.ndim)
        if self.t == 1:
            self.sides[i] = [unfolded(g, k) @ unfolded(g, k).T for k in axes]
            self.bases[i] = [MATRIX[Op.EIGH].compute(-s[None])[0] for s in self.sides[i]]
            return np.zeros_like(g)
        steps, bases = self.t - 1, self.bases[i]
        self.m[i] = h["beta1"] * self.m[i] + (1 - h["beta1"]) * g
        self.v[i] = h["beta2"] * self.v[i] + (1 - h["beta2"]) * along(g, bases) ** 2
        turned = along(self.m[i], bases) / (np.sqrt(self.v[i]) + h["eps"])
        back = along(turned, [q.T for q in bases])
        self._follow(i, g, (1 - h["beta2"]) / (1 - h["beta2"] ** self.t), h)
        if steps % h["every"] == 0:
            self.bases[i] = [_orthonormal(s @ q) for s, q in zip(self.sides[i], bases, strict=True)]
        return np.asarray(np.sqrt(1 - h["beta2"] ** steps) / (1 - h["beta1"] ** steps) * back)

    def _follow(self, i: int, g: Array, weight: float, h: Hyper) -> None:
        """One step of all covariances, by the inverses of those before."""
        inverses = []
        for s, q in zip(self.sides[i], self.bases[i], strict=True):
            inverses.append(q / np.maximum(np.diag(q.T @ s @ q), h["eps"]) @ q.T)
        for k, side in enumerate(self.sides[i]):
            others: Array = functools.reduce(np.kron, inverses[:k] + inverses[k + 1 :])
            rows = unfolded(g, k)
            self.sides[i][k] = side + weight * (rows @ others @ rows.T / rows.shape[1] - side)


def _orthonormal(x: Array) -> Array:
    """The orthogonal factor beside a triangular one with a positive diagonal."""
    orthogonal, triangular = np.linalg.qr(x)
    return np.asarray(orthogonal * np.sign(np.diagonal(triangular)))
