"""The kin of Muon as they are printed, in NumPy: written from papers and authors' code, and not from our rules."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from tests.rules.printed_decomposed import WithAdam, orthogonal, polynomials
from tests.rules.runs import Array, Hyper

#: You's five polynomials.
_YOU = (
    (4.0848, -6.8946, 2.9270), (3.9505, -6.3029, 2.6377), (3.7418, -5.5913, 2.3037), (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)  # fmt: skip


class Kin(WithAdam):
    """A step of a matrix by its momentum, beside a decoupled weight decay."""

    def matrix(self, i: int, g: Array, w: Array, h: Hyper) -> Array:
        m = self.m[i].reshape(g.shape)
        step = self.direction(i, g, w, m, h)
        return np.asarray(w - h["lr"] * (step + h.get("weight_decay", 0) * w))

    def direction(self, i: int, g: Array, w: Array, m: Array, h: Hyper) -> Array:
        """The step of a matrix, without rate and decay; it changes the momentum `m` in place."""
        raise NotImplementedError


class MuonBP(Kin):
    """Algorithm 1 of Khaled and others (2025), with blocks of columns, and the size of Adam's steps for each."""

    def direction(self, i: int, g: Array, w: Array, m: Array, h: Hyper) -> Array:
        m[:] = h["momentum"] * m + g
        whole = (self.t - 1) % int(h["period"]) == 0 or m.shape[1] % int(h["blocks"])
        parts = [m] if whole else np.split(m, int(h["blocks"]), axis=1)
        rate = 1 if (self.t - 1) % int(h["period"]) == 0 else h["block_lr"]
        steps = [0.2 * math.sqrt(max(part.shape)) * orthogonal(part, int(h["ns_steps"])) for part in parts]
        return np.asarray(rate * np.hstack(steps))


class TurboMuon(Kin):
    """The preconditioned iteration of Boissin and others (2025) by their code, in the place of Muon's."""

    def direction(self, i: int, g: Array, w: Array, m: Array, h: Hyper) -> Array:
        m[:] = h["momentum"] * m + (1 - h["momentum"]) * g
        x = (1 - h["momentum"]) * g + h["momentum"] * m
        wide = x.T if x.shape[0] > x.shape[1] else x
        scaled = wide / np.sqrt(np.abs(wide @ wide.T).sum(1, keepdims=True))
        o = polynomials(scaled, _YOU[-int(h["iterations"]) :])
        return np.asarray(math.sqrt(max(1, g.shape[0] / g.shape[1])) * (o.T if x.shape[0] > x.shape[1] else o))


class MarsM(Kin):
    """The authors' code of Liu, Yuan and Gu (2025), in its approximate form."""

    def __init__(self, params: Sequence[Array]) -> None:
        super().__init__(params)
        self.last: dict[int, Array] = {}

    def direction(self, i: int, g: Array, w: Array, m: Array, h: Hyper) -> Array:
        factor = h["gamma"] * h["momentum"] / (1 - h["momentum"])
        c = (g - self.last.get(i, np.zeros_like(g))) * factor + g
        size = np.linalg.norm(c)
        c = c / size if size > 1 else c
        self.last[i] = g
        m[:] = m * h["momentum"] + (1 - h["momentum"]) * c
        return np.asarray(0.2 * math.sqrt(max(g.shape)) * orthogonal(m, int(h["ns_steps"])))


class Mano(Kin):
    """Algorithm 1 of Gu and Xie (2026) by the authors' code of its first version, without Nesterov's momentum."""

    def direction(self, i: int, g: Array, w: Array, m: Array, h: Hyper) -> Array:
        axis = (self.t - 1) % 2
        m[:] = h["momentum"] * m + g
        unit = w / np.maximum(np.linalg.norm(w, axis=axis, keepdims=True), h["eps"])
        tangent = m - (m * unit).sum(axis=axis, keepdims=True) * unit
        u = tangent / np.maximum(np.linalg.norm(tangent, axis=axis, keepdims=True), h["eps"])
        return np.asarray(0.2 * math.sqrt(g.shape[axis]) * u)


class SinkGD(Kin):
    """Algorithms 3 and 4 of Scetbon, Ma, Gong and Meeds (2025)."""

    def direction(self, i: int, g: Array, w: Array, m: Array, h: Hyper) -> Array:
        rows, cols = g.shape
        for _ in range(int(h["rounds"])):
            g = math.sqrt(cols) * np.diag(1 / np.maximum(np.linalg.norm(g, axis=1), h["floor"])) @ g
            g = math.sqrt(rows) * g @ np.diag(1 / np.maximum(np.linalg.norm(g, axis=0), h["floor"]))
        return np.asarray(g)

    def _adamw(self, i: int, g: Array, h: Hyper) -> None:
        super()._adamw(i, g, {**h, "lr": h["adam_lr"], "eps": h["eps"]})


class AdaMuonSign(Kin):
    """Algorithm 1 of the later versions of Si, Zhang and Shen (2025), and the Nesterov momentum of their code."""

    def __init__(self, params: Sequence[Array]) -> None:
        super().__init__(params)
        self.squares = [np.zeros((len(p), p.size // len(p))) if p.ndim else p for p in self.w]

    def direction(self, i: int, g: Array, w: Array, m: Array, h: Hyper) -> Array:
        m[:] = h["momentum"] * m + g
        ahead = g + h["momentum"] * m if h["nesterov"] else m
        o = orthogonal(np.sign(ahead), int(h["ns_steps"]))
        self.squares[i] = h["momentum"] * self.squares[i] + (1 - h["momentum"]) * o**2
        u = o / (np.sqrt(self.squares[i]) + h["eps"])
        return np.asarray(0.2 * math.sqrt(g.size) / (np.linalg.norm(u) + h["eps"]) * u)


class Aurora(Kin):
    """The authors' code of Dewulf and others (2026), which turns wide matrices to tall ones."""

    def direction(self, i: int, g: Array, w: Array, m: Array, h: Hyper) -> Array:
        m[:] = m + (1 - h["momentum"]) * (g - m)
        x = g + h["momentum"] * (m - g)
        longer = math.sqrt(max(1, g.shape[0] / g.shape[1]))
        return np.asarray(longer * (self.even(x, h) if g.shape[0] > g.shape[1] else self.even(x.T, h).T))

    def even(self, x: Array, h: Hyper) -> Array:
        """The orthogonal matrix of a matrix with scaled rows, where it is tall."""
        rows, cols = x.shape
        if rows == cols:
            return self.polar(x, h)
        scale = 1 / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), h["eps"])
        for _ in range(int(h["rounds"]) - 1):
            squares = (self.polar(scale * x, h) ** 2).sum(axis=1, keepdims=True)
            scale = scale * (cols / rows / np.maximum(squares, h["eps"] ** 2)) ** h["power"]
        return self.polar(scale * x, h)

    @staticmethod
    def polar(x: Array, h: Hyper) -> Array:
        """The simple quintic of the authors."""
        return polynomials(x / max(float(np.linalg.norm(x)), 1e-7), [(2, -1.5, 0.5)] * int(h["iterations"]))
