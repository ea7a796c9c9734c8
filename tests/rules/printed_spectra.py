"""Later kin of Muon as they are printed, in NumPy: written from papers and authors' code, and not from our rules.

Their iterations are polynomials of singular values, as in `tests.rules.printed_decomposed`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from tests.rules.printed import Printed
from tests.rules.printed_decomposed import WithAdam, orthogonal, polynomials
from tests.rules.printed_muons import Kin
from tests.rules.runs import Array, Hyper

#: nanochat's five polynomials.
_NANOCHAT = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)


def _norm(x: Array) -> float:
    return math.sqrt(float(np.sum(x * x)))


def _steps(h: Hyper) -> int:
    return int(h["ns_steps"])


class NanochatMuon(WithAdam):
    """nanochat's fused step of July 2026, of one matrix."""

    def __init__(self, params: Sequence[Array]) -> None:
        super().__init__(params)
        self.squares: dict[int, Array] = {}

    def matrix(self, i: int, g: Array, w: Array, h: Hyper) -> Array:
        m = self.m[i].reshape(g.shape)
        m += (1 - h["momentum"]) * (g - m)
        x = g + h["momentum"] * (m - g)
        lengths = np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-6)
        x = x * (_norm(x) / len(x) ** 0.5 / lengths)
        o = polynomials(x / (_norm(x) * 1.01 + 1e-6), _NANOCHAT[: _steps(h)])
        o = o * (min(g.shape) ** 0.5 / max(_norm(o), 1e-6))
        axis = 1 if g.shape[0] >= g.shape[1] else 0
        means = (o**2).mean(axis=axis, keepdims=True)
        self.squares[i] = h["beta"] * self.squares.get(i, np.zeros_like(means)) + (1 - h["beta"]) * means
        sizes = 1 / np.sqrt(np.maximum(self.squares[i], 1e-10))
        before, after = (math.sqrt(float(np.sum(means * g.shape[axis] * f))) for f in (1.0, sizes**2))
        o = o * sizes * (before / max(after, 1e-10))
        rate = h["lr"] * math.sqrt(max(1, g.shape[0] / g.shape[1]))
        return np.asarray(w - rate * o - rate * h["weight_decay"] * w * (o * w >= 0))


class MuonAtan2(Printed):
    """adam-atan2-pytorch's MuonAdamAtan2, where tensors of four dimensions have the other half."""

    def update(self, i: int, g: Array, h: Hyper) -> None:
        self.w[i] = self.w[i] * (1 - h["lr"] * h["weight_decay"])
        if g.ndim in (2, 3):
            self.m[i] = self.m[i] + (1 - h["momentum"]) * (g - self.m[i])
            batch = self.m[i].reshape(-1, *g.shape[-2:])
            step = np.stack([orthogonal(x, _steps(h)) for x in batch]).reshape(g.shape)
            self.w[i] = self.w[i] - h["lr"] * math.sqrt(max(g.shape[-2:])) * 0.2 * step
        else:
            self.m[i] = h["beta1"] * self.m[i] + (1 - h["beta1"]) * g
            self.v[i] = h["beta2"] * self.v[i] + (1 - h["beta2"]) * g**2
            sigma = np.sqrt(self.v[i] * h["b"] ** 2 / (1 - h["beta2"] ** self.t))
            self.w[i] = self.w[i] - h["lr"] * h["a"] * np.arctan2(self.m[i] / (1 - h["beta1"] ** self.t), sigma)


class MuonH(WithAdam):
    """levanter's MuonH: the norm is that of the matrix before the step, which is the first one but for rounding."""

    def matrix(self, i: int, g: Array, w: Array, h: Hyper) -> Array:
        m = self.m[i].reshape(g.shape)
        m[:] = h["momentum"] * m + g
        u = orthogonal(h["momentum"] * m + g, _steps(h))
        moved = w - h["lr"] * u * _norm(w) / max(_norm(u), 1e-10)
        return np.asarray(moved / _norm(moved) * _norm(w))


class Muown(WithAdam):
    """The class of Lion, Hübler, Li, Orvieto and He (2026), with a row's norm and its direction as variables."""

    def __init__(self, params: Sequence[Array]) -> None:
        super().__init__(params)
        self.lengths: dict[int, list[Array]] = {}
        self.adam: dict[int, list[Array]] = {}

    def matrix(self, i: int, g: Array, w: Array, h: Hyper) -> Array:
        m = self.m[i].reshape(g.shape)
        first = np.linalg.norm(w, axis=1, keepdims=True)
        size, length = self.lengths.setdefault(i, [first, first])
        unit = w / size
        along = (g * unit).sum(axis=1, keepdims=True)
        across = size / length * (g - unit * along)
        m[:] = h["momentum"] * m + across
        factor = orthogonal(across + h["momentum"] * m, _steps(h))
        moved = unit * length - h["lr"] * 0.2 * max(g.shape) ** 0.5 * factor
        means, squares = self.adam.get(i, [np.zeros_like(size)] * 2)
        means = h["beta1"] * means + (1 - h["beta1"]) * along
        squares = h["beta2"] * squares + (1 - h["beta2"]) * along**2
        self.adam[i] = [means, squares]
        sigma = np.sqrt(squares / (1 - h["beta2"] ** self.t)) + h["eps"]
        size = size - h["lr"] * means / (1 - h["beta1"] ** self.t) / sigma
        length = np.linalg.norm(moved, axis=1, keepdims=True)
        composed = size * (moved / length) - h["lr"] * h["weight_decay"] * w
        self.lengths[i] = [np.linalg.norm(composed, axis=1, keepdims=True) if h["weight_decay"] else size, length]
        return np.asarray(composed)


class EchoMuon(Kin):
    """Mastromichalakis's package (2026), whose gate is of the momenta before the gradient."""

    def __init__(self, params: Sequence[Array]) -> None:
        super().__init__(params)
        self.slow: dict[int, Array] = {}
        self.gates: dict[int, tuple[Array, Array]] = {}

    def direction(self, i: int, g: Array, w: Array, m: Array, h: Hyper) -> Array:
        slow = self.slow.get(i, np.zeros_like(g))
        turned = g.shape[0] > g.shape[1]
        if self.t % int(h["every"]) == 0:
            fast, late = (m.T, slow.T) if turned else (m, slow)
            values, vectors = np.linalg.eigh(fast @ fast.T)
            support = np.array([u @ late @ (fast.T @ u) for u in vectors.T]) / np.maximum(values, 1e-12)
            self.gates[i] = vectors, np.clip(support / max(np.median(support), 1e-12), h["floor"], 1)
        m[:] = h["momentum"] * m + g
        self.slow[i] = h["slow"] * slow + g
        o = orthogonal(g + h["momentum"] * m, _steps(h))
        if i in self.gates:
            vectors, gate = self.gates[i]
            x = o.T if turned else o
            x = x - vectors @ ((h["gate"] * (1 - gate))[:, None] * (vectors.T @ x))
            o = x.T if turned else x
        return np.asarray(o * math.sqrt(max(1.0, g.shape[0] / g.shape[1])))


class Trion(Kin):
    """The authors' step of Modoranu and others (2025) by products with the transform, on the chosen vectors alone."""

    def direction(self, i: int, g: Array, w: Array, m: Array, h: Hyper) -> Array:
        m += g
        n = min(g.shape)
        k = np.arange(n)
        transform = math.sqrt(2 / n) * np.cos(np.pi * k[:, None] * (2 * k + 1) / (2 * n))
        transform[0] *= math.sqrt(0.5)
        tall = g.shape[0] >= g.shape[1]
        spectrum = m @ transform if tall else transform @ m
        sizes = np.abs(spectrum).sum(axis=0 if tall else 1)
        chosen = np.argsort(-sizes, kind="stable")[: min(int(h["rank"]), n)]
        kept = spectrum[:, chosen] if tall else spectrum[chosen]
        basis = transform[:, chosen] if tall else transform[chosen]
        m -= (1 - h["mu"]) * (kept @ basis.T if tall else basis.T @ kept)
        low = orthogonal(kept, _steps(h))
        return np.asarray(math.sqrt(max(1, g.shape[0] / g.shape[1])) * (low @ basis.T if tall else basis.T @ low))


class ASGO(Kin):
    """The authors' code of An and others (2025), with the root itself in the place of its iterations."""

    def __init__(self, params: Sequence[Array]) -> None:
        super().__init__(params)
        self.covariance: dict[int, Array] = {}

    def direction(self, i: int, g: Array, w: Array, m: Array, h: Hyper) -> Array:
        m += (1 - h["momentum"]) * (g - m)
        wide = g.shape[0] < g.shape[1]
        new = g @ g.T if wide else g.T @ g
        self.covariance[i] = h["beta"] * self.covariance.get(i, np.zeros_like(new)) + (1 - h["beta"]) * new
        values, vectors = np.linalg.eigh(self.covariance[i])
        root = vectors / np.sqrt(values + h["eps"]) @ vectors.T
        update = root @ m if wide else m @ root
        return np.asarray(update * 0.2 * math.sqrt(g.size) / _norm(update))


class DASGO(ASGO):
    """The authors' code of ASGO with one number for each column."""

    def direction(self, i: int, g: Array, w: Array, m: Array, h: Hyper) -> Array:
        m += (1 - h["momentum"]) * (g - m)
        self.covariance[i] = h["beta"] * self.covariance.get(i, np.zeros(g.shape[1])) + (1 - h["beta"]) * (g**2).sum(0)
        update = m * (self.covariance[i] + h["eps"]) ** -0.5
        return np.asarray(update * 0.2 * math.sqrt(g.size) / _norm(update))


class COSMOS(WithAdam):
    """The authors' code of Liu and others (2025). Where nothing is left for Muon but rounding, theirs takes that."""

    def __init__(self, params: Sequence[Array]) -> None:
        super().__init__(params)
        self.parts: dict[int, list[Array]] = {}

    def matrix(self, i: int, g: Array, w: Array, h: Hyper) -> Array:
        beta1, beta2, rank = h["beta1"], h["beta2"], min(int(h["rank"]), *g.shape)
        m = self.m[i].reshape(g.shape)
        m[:] = beta1 * m + g
        if self.t == 1:
            basis = np.linalg.svd(g.T @ g)[0][:, :rank]
            inner, squares = (1 - beta2) * (basis.T @ g.T) @ (g @ basis), np.zeros((len(g), rank))
        else:
            before, inner, squares = self.parts[i]
            basis = np.linalg.qr(beta2 * before @ inner + (1 - beta2) * g.T @ (g @ before))[0]
            turn = before.T @ basis
            inner = beta2 * turn.T @ inner @ turn + (1 - beta2) * (g @ basis).T @ (g @ basis)
        squares = beta2 * squares + (1 - beta2) * (g @ basis) ** 2
        self.parts[i] = [basis, inner, squares]
        correction = (1 - beta1**self.t) / (1 - beta1)
        n = (g + beta1 * m) / (1 + beta1 * correction)
        led = n @ basis
        step = led / (np.sqrt(squares) / math.sqrt(1 - beta2**self.t) + h["eps"]) @ basis.T
        rest = n - led @ basis.T
        if _norm(rest) > 1e-12 * _norm(n):
            o = orthogonal(rest, _steps(h))
            step = step + h["gamma"] * math.sqrt(g.size) * o / (_norm(o) + h["eps"])
        length = math.sqrt(g.size) * h["lr_ratio"] * h["lr"] / (_norm(step) + h["eps"])
        return np.asarray(w * (1 - h["lr"] * h["weight_decay"]) - length * step)


class PRISM(Kin):
    """The algorithm of Yang (2026)."""

    def direction(self, i: int, g: Array, w: Array, m: Array, h: Hyper) -> Array:
        m[:] = h["momentum"] * m + (1 - h["momentum"]) * g
        stacked = np.vstack([m, h["gamma"] * (g - m)])
        return orthogonal(stacked, _steps(h))[: len(g)]
