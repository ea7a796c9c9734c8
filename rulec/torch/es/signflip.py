"""One noise for all directions, which differ by the signs of its rows and columns."""

from __future__ import annotations

import torch
from torch import Tensor

from rulec.es.fitness import Floats
from rulec.es.streams import COLUMNS, ROWS
from rulec.torch.es.layer import RowSource, SharedNoise, Source
from rulec.torch.es.maps import Map
from rulec.torch.es.population import Population, combined


class SignFlip(SharedNoise):
    """r_d E c_d: the product by E is one of all rows, and signs are flipped before and after it."""

    def _of_rows(self, dtype: torch.dtype) -> Tensor:
        return self.kept("rows", lambda: self.draws.signs(ROWS, self.directions, self.rows, dtype), dtype)

    def _of_columns(self, dtype: torch.dtype) -> Tensor:
        return self.kept("columns", lambda: self.draws.signs(COLUMNS, self.directions, self.columns, dtype), dtype)

    def add(self, base: Tensor, x: Tensor, way: Map, who: Population) -> Tensor:
        """A second product, with signs."""
        by_rows, by_columns = self.sides
        if by_columns:
            x = x * way.spread(way.of_columns(self._of_columns(x.dtype)), x)
        noise = way.product(x, self.shared(x.dtype))
        return combined(base, noise, who, way.spread(self._of_rows(x.dtype), noise) if by_rows else None)

    def lookup(self, index: Tensor) -> Tensor:
        """Lines of the one noise, with signs."""
        by_rows, by_columns = self.sides
        lines = self.shared()[index]
        if by_rows:
            pairs = torch.arange(len(self.directions), device=index.device).view(-1, *(1,) * (index.dim() - 3))
            lines = lines * self._of_rows(self.dtype)[pairs, index].unsqueeze(-1)
        if by_columns:
            lines = lines * self._of_columns(self.dtype).view(-1, *(1,) * (index.dim() - 3), self.columns)
        return lines

    def dense(self, direction: int) -> Tensor:
        """The one noise, with signs."""
        one = torch.zeros(len(self.directions), dtype=self.dtype, device=self.draws.device)
        one[direction] = 1
        return self.shared() * self._signs(one)

    def estimate(self, weights: Floats, weight: Tensor) -> Tensor:
        """The one noise times the weighted sum of signs: a vector, or where both sides differ a matrix."""
        return self.last("noise", self.draw_shared).mul_(self._signs(self.short(weights)))

    def source(self, weights: Floats) -> Source | None:
        """Rows of the one noise times their sum of signs."""
        signs, common = self._signs(self.short(weights)), self.shared()

        def write(span: slice, out: Tensor) -> None:
            here = common[span]
            torch.mul(here, signs[span] if signs.shape[0] > 1 else signs, out=out.view(here.shape))

        return RowSource(self.dtype, write)

    def _signs(self, weights: Tensor) -> Tensor:
        """The weighted sum of signs, as it meets the weight."""
        by_rows, by_columns = self.sides
        if by_rows and by_columns:
            total = (self._of_rows(self.dtype) * weights.unsqueeze(1)).t() @ self._of_columns(self.dtype)
        elif by_rows:
            total = (weights @ self._of_rows(self.dtype)).unsqueeze(1)
        else:
            total = (weights @ self._of_columns(self.dtype)).unsqueeze(0)
        return total.view(*total.shape, *(1,) * len(self.kernel))
