"""Noise of low rank: its factors are kept, and rows are multiplied by them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rulec.backend.product import Product
from rulec.es import families
from rulec.es.fitness import Floats
from rulec.es.streams import COLUMNS, ROWS
from rulec.torch.es.layers import Map
from rulec.torch.es.noise.base import AddedNoise, Source
from rulec.torch.es.population import Population, combined

#: Ranks up to this are added one by one in place; more of them by a batched product.
_FEW = 4


class LowRank(AddedNoise, families.LowRank):
    """Products by two factors of each direction."""

    def factor(
        self, directions: Sequence[int], purpose: int, shape: tuple[int, ...], dtype: torch.dtype | None = None
    ) -> Tensor:
        """The same, kept."""
        make = super().factor
        return self.every(f"factors {purpose}", lambda every: make(every, purpose, shape), directions, dtype)

    def add(self, base: Tensor, x: Tensor, way: Map, who: Population) -> Tensor:
        """Rows by `right`, a few numbers for each (in each group and place), and these by `left`."""
        left = self.factor(self.directions, ROWS, (self.rows,), x.dtype)
        filters = self.factor(self.directions, COLUMNS, (self.columns, *self.window), x.dtype)
        if way.groups > 1:
            filters = filters.repeat(1, way.groups, *(1,) * (filters.dim() - 2))
        inner = way.each(x, filters)
        if way.groups == 1 and left.shape[1] <= _FEW:
            for r in range(left.shape[1]):
                base = combined(base, inner.narrow(way.axis, r, 1), who, way.spread(left[:, r], inner))
            return base
        return combined(base, way.pointwise().each(inner, self.spread(left.transpose(1, 2))), who)

    def lookup(self, index: Tensor) -> Tensor:
        """Lines of `left` by `right`."""
        lines = self.left(self.directions).transpose(1, 2)[self.pairs(index), index]
        factors = self.across(self.right(self.directions), index)
        return torch.matmul(lines.unsqueeze(-2), factors).squeeze(-2)

    def source(self, weights: Floats) -> Source | None:
        """The product of the factors, made tile by tile."""
        left, right = self.factors(self.draws.weights(weights))
        return Product(left.flatten(0, 1), right.flatten(0, 1).flatten(1))
