"""Noise in orders: rows are multiplied by the one noise, with inputs and outputs put in order."""

from __future__ import annotations

import torch
from torch import Tensor

from rulec.backend.product import Product
from rulec.es import families
from rulec.es.fitness import Floats
from rulec.es.streams import COLUMNS, ROWS
from rulec.torch.es.layers import Map
from rulec.torch.es.noise.base import SharedNoise, Source
from rulec.torch.es.population import Population, combined


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
