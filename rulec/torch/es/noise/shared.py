"""Noise that all directions share: by flipped signs, by permuted order, and of low rank.

Rows are multiplied by the one noise. With signs, signs are flipped before and after it. With orders, inputs and outputs
are permuted. Of low rank, the noise is kept as its factors, and rows are multiplied by them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rulec.backend.capabilities import Product
from rulec.es import families
from rulec.es.fitness import Floats
from rulec.es.streams import COLUMNS, ROWS
from rulec.torch.es.layers import Map
from rulec.torch.es.noise.base import AddedNoise, RowSource, SharedNoise, Source
from rulec.torch.es.population import Population, combined


class SignFlip(SharedNoise, families.SignFlip):
    """A second product, with signs."""

    def add(self, base: Tensor, x: Tensor, way: Map, who: Population) -> Tensor:
        """Signs of columns before, those of rows after."""
        if self.by_columns:
            x = x * way.spread(way.of_columns(self.lines("signs", self.directions, COLUMNS, x.dtype)), x)
        noise = way.product(x, self.shared(x.dtype))
        rows = self.lines("signs", self.directions, ROWS, x.dtype) if self.by_rows else None
        return combined(base, noise, who, None if rows is None else way.spread(rows, noise))

    def lookup(self, index: Tensor) -> Tensor:
        """Lines of the one noise, with signs."""
        lines = self.shared()[index]
        if self.by_rows:
            lines = lines * self.lines("signs", self.directions, ROWS)[self.pairs(index), index].unsqueeze(-1)
        if self.by_columns:
            lines = lines * self.across(self.lines("signs", self.directions, COLUMNS), index)
        return lines

    def summed(self, weights: Tensor, weight: Tensor) -> Tensor:
        """The same in the memory of the one noise."""
        return self.last_shared().mul_(self.signs(self.directions, weights))

    def source(self, weights: Floats) -> Source | None:
        """Rows of the one noise times their sum of signs."""
        signs, common = self.signs(self.directions, self.draws.weights(weights)), self.shared()

        def write(span: slice, out: Tensor) -> None:
            here = common[span]
            torch.mul(here, signs[span] if signs.shape[0] > 1 else signs, out=out.view(here.shape))

        return RowSource(self.dtype, write)


class Permuted(SharedNoise, families.Permuted):
    """A second product, of inputs in each direction's order, with outputs put in order."""

    def _inputs(self) -> Tensor:
        """For each direction and column of noise the input that it belongs to: the inverse of the order."""
        orders = self.lines("orders", self.directions, COLUMNS)
        return self.kept("inputs", lambda: orders.argsort(1)[:, : self.wide].contiguous())

    def signs(self, dtype: torch.dtype | None = None) -> Tensor | None:
        """The same, kept."""
        return None if self.perturbation.antithetic else self.kept("signs", super().signs, dtype)

    def add(self, base: Tensor, x: Tensor, way: Map, who: Population) -> Tensor:
        """Columns before, rows after."""
        if self.by_rows and way.groups > 1:
            return self.add_one_by_one(base, x, way, who)  # an order of rows takes noise from one group to another
        if self.by_columns:
            x = way.take(x, way.inputs_of(self._inputs(), self.columns))
        noise = way.product(x, self.shared(x.dtype))
        if self.by_rows:
            noise = way.take(self.with_zero(noise, way.axis, self.rows), self.places(self.directions, ROWS))
        signs = self.signs(noise.dtype)
        return combined(base, noise, who, None if signs is None else way.spread(signs.unsqueeze(1), noise))

    def lookup(self, index: Tensor) -> Tensor:
        """Lines of the one noise, in each direction's order."""
        common = self.shared()
        if self.by_rows:
            index = self.places(self.directions, ROWS)[self.pairs(index), index]
            common = self.with_zero(common, 0, self.rows)
        lines = common[index]
        if self.by_columns:
            places = self.across(self.places(self.directions, COLUMNS), index)
            lines = self.with_zero(lines, -1, self.columns).gather(-1, places.expand(*index.shape, self.columns))
        signs = self.signs()
        return lines if signs is None else lines * self.across(signs.unsqueeze(1), index)

    def terms(self, weights: Tensor) -> Tensor:
        """The same in one array, without directions that do not count."""
        out = self.draws.zeros(self.shape)
        for direction, a in enumerate(weights.tolist()):
            if a:
                out.add_(self.ordered(direction), alpha=a)
        return out

    def source(self, weights: Floats) -> Source | None:
        """Of orders of rows a product of two matrices, of them and of the noise; of others there is none."""
        if (self.by_rows, self.by_columns) != (True, False):
            return None
        return Product(self.mixed(self.signed(self.draws.weights(weights)), ROWS).t(), self.shared().flatten(1))


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
