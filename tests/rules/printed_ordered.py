"""Algorithms that order values as they are printed, in NumPy: written from their authors' code."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from tests.rules.printed import Printed
from tests.rules.printed_decomposed import WithAdam, orthogonal
from tests.rules.runs import Array, Hyper


class Root(WithAdam):
    """The authors' code of He and others (2025), for matrices of other extents than those of its model."""

    def matrix(self, i: int, g: Array, w: Array, h: Hyper) -> Array:
        m = self.m[i].reshape(g.shape)
        m[:] = h["momentum"] * m + g
        step = g + h["momentum"] * m
        threshold = np.quantile(np.abs(step), h["kept"]) + 1e-9
        outliers = np.sign(step) * np.maximum(np.abs(step) - threshold, 0)
        o = orthogonal(step - outliers, int(h["ns_steps"]))
        return np.asarray(w - h["lr"] * (0.2 * math.sqrt(max(g.shape)) * o + h["weight_decay"] * w))


class PercentileClip(Printed):
    """Gradient descent behind bitsandbytes' percentile_clipping: by its kernel for the ring, and its function."""

    def __init__(self, params: Sequence[Array]) -> None:
        super().__init__(params)
        self.rings: dict[int, Array] = {}

    def update(self, i: int, g: Array, h: Hyper) -> None:
        square = float(np.sum(g * g))
        ring = self.rings.setdefault(i, np.full(100, square))
        ring[self.t % 100] = square
        size, limit = math.sqrt(square), math.sqrt(np.sort(ring)[int(h["percentile"])])
        self.w[i] = self.w[i] - h["lr"] * g * (limit / size if size > limit else 1.0)
