"""Noise with signs: rows are multiplied by the one noise, and signs are flipped before and after it."""

from __future__ import annotations

import torch
from torch import Tensor

from rulec.es import families
from rulec.es.fitness import Floats
from rulec.es.streams import COLUMNS, ROWS
from rulec.torch.es.layers import Map
from rulec.torch.es.noise.base import RowSource, SharedNoise, Source
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
