"""Noise of low rank: a product of two factors for each direction (Sarkar et al., EGGROLL, arXiv 2511.16652)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rulec.backend.product import Product
from rulec.es.fitness import Floats
from rulec.es.streams import COLUMNS, ROWS
from rulec.torch.es.layer import LayerNoise, Source
from rulec.torch.es.maps import Map
from rulec.torch.es.population import Population, combined

#: Ranks up to this are added one by one in place; more of them by a batched product.
_FEW = 4


class LowRank(LayerNoise):
    """The sum over r of A_r B_r, over the root of the rank: `left` (directions, rank, rows), `right` (..., columns)."""

    def _left(self, dtype: torch.dtype | None = None) -> Tensor:
        return self.kept("left", lambda: self._factor(ROWS, self.rows), dtype)

    def _right(self, dtype: torch.dtype | None = None) -> Tensor:
        return self.kept("right", lambda: self._factor(COLUMNS, self.columns * self.kernel.numel()), dtype)

    def _factor(self, purpose: int, count: int) -> Tensor:
        """Each with the fourth root of the rank in it, so that their product is over its root."""
        rank = self.perturbation.rank
        values = self.draws.values(purpose, self.directions, rank * count, self.dtype)
        return (values / math.sqrt(math.sqrt(rank))).view(-1, rank, count)

    def add(self, base: Tensor, x: Tensor, way: Map, who: Population) -> Tensor:
        """Rows by `right`, a few numbers for each (in each group and place), and these by `left`."""
        left, right = self._left(x.dtype), self._right(x.dtype)
        filters = right.view(*right.shape[:2], self.columns, *self.kernel)
        if way.groups > 1:
            filters = filters.repeat(1, way.groups, *(1,) * (filters.dim() - 2))
        inner = way.each(x, filters)
        if way.groups == 1 and right.shape[1] <= _FEW:
            for r in range(right.shape[1]):
                base = combined(base, inner.narrow(way.axis, r, 1), who, way.spread(left[:, r], inner))
            return base
        outer = left.transpose(1, 2).reshape(*left.shape[::2], left.shape[1], *(1,) * len(self.kernel))
        return combined(base, way.pointwise().each(inner, outer), who)

    def lookup(self, index: Tensor) -> Tensor:
        """Lines of `left` by `right`."""
        pairs = torch.arange(len(self.directions), device=index.device).view(-1, *(1,) * (index.dim() - 3))
        lines = self._left(self.dtype).transpose(1, 2)[pairs, index]
        right = self._right(self.dtype)
        factors = right.view(-1, *(1,) * (index.dim() - 3), *right.shape[1:])
        return torch.matmul(lines.unsqueeze(-2), factors).squeeze(-2)

    def dense(self, direction: int) -> Tensor:
        """One product of the factors."""
        return (self._left(self.dtype)[direction].t() @ self._right(self.dtype)[direction]).view(self.shape)

    def estimate(self, weights: Floats, weight: Tensor) -> Tensor:
        """One product of all factors; both signs of a direction are one term of it."""
        product = self._product(weights)
        return torch.mm(product.outputs.t(), product.inputs).view(self.shape)

    def source(self, weights: Floats) -> Source | None:
        """The product of the factors, made tile by tile."""
        return self._product(weights)

    def _product(self, weights: Floats) -> Product:
        left = self._left(self.dtype) * self.short(weights).view(-1, 1, 1)
        return Product(left.flatten(0, 1), self._right(self.dtype).flatten(0, 1))
