"""One noise for all directions, which differ by the order of its rows and columns, and without pairs by a sign."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from rulec.backend.product import Product
from rulec.es.fitness import Floats
from rulec.es.streams import COLUMNS, ROWS, SHARED, SIGNS
from rulec.torch.es.layer import SharedNoise, Source
from rulec.torch.es.maps import Map
from rulec.torch.es.population import Population, combined


class Permuted(SharedNoise):
    """Row i of a direction is row `order[i]` of the noise, zero where there is none; so with columns."""

    def _row_orders(self) -> Tensor:
        return self.kept("rows", lambda: self.draws.orders(ROWS, self.directions, self.rows))

    def _column_orders(self) -> Tensor:
        return self.kept("columns", lambda: self.draws.orders(COLUMNS, self.directions, self.columns))

    def _inputs(self) -> Tensor:
        """For each direction and column of noise the input that it belongs to: the inverse of the order."""
        return self.kept("inputs", lambda: self._column_orders().argsort(1)[:, : self.lines[1]].contiguous())

    def _signs(self, dtype: torch.dtype) -> Tensor | None:
        """Each direction's own sign; None of antithetic pairs, which have both."""
        if self.perturbation.antithetic:
            return None
        count = len(self.directions)
        return self.kept("signs", lambda: self.draws.signs(SIGNS, [SHARED], count, self.dtype)[0], dtype)

    def add(self, base: Tensor, x: Tensor, way: Map, who: Population) -> Tensor:
        """A second product, of inputs in each direction's order, with outputs put in order."""
        by_rows, by_columns = self.sides
        if by_rows and way.groups > 1:
            return self.add_one_by_one(base, x, way, who)  # an order of rows takes noise from one group to another
        if by_columns:
            x = way.take(x, way.inputs_of(self._inputs(), self.columns))
        noise = way.product(x, self.shared(x.dtype))
        if by_rows:
            noise = way.take(_with_zero(noise, way.axis, self.rows), self._row_orders().clamp(max=self.lines[0]))
        signs = self._signs(noise.dtype)
        return combined(base, noise, who, None if signs is None else way.spread(signs.unsqueeze(1), noise))

    def lookup(self, index: Tensor) -> Tensor:
        """Lines of the one noise, in each direction's order."""
        by_rows, by_columns = self.sides
        ones = (1,) * (index.dim() - 3)
        common = self.shared()
        if by_rows:
            pairs = torch.arange(len(self.directions), device=index.device).view(-1, *ones)
            index = self._row_orders()[pairs, index].clamp(max=self.lines[0])
            common = _with_zero(common, 0, self.rows)
        lines = common[index]
        if by_columns:
            places = self._column_orders().clamp(max=self.lines[1]).view(-1, *ones, self.columns)
            lines = _with_zero(lines, -1, self.columns).gather(-1, places.expand(*index.shape, self.columns))
        signs = self._signs(self.dtype)
        return lines if signs is None else lines * signs.view(-1, *ones, 1)

    def dense(self, direction: int) -> Tensor:
        """The one noise, in the direction's order and with its sign."""
        noise, signs = self._ordered(direction), self._signs(self.dtype)
        return noise if signs is None else noise * signs[direction]

    def _ordered(self, direction: int) -> Tensor:
        by_rows, by_columns = self.sides
        noise = self.shared()
        if by_rows:
            order = self._row_orders()[direction].clamp(max=self.lines[0])
            noise = _with_zero(noise, 0, self.rows).index_select(0, order)
        if by_columns:
            order = self._column_orders()[direction].clamp(max=self.lines[1])
            noise = _with_zero(noise, 1, self.columns).index_select(1, order)
        return noise

    def estimate(self, weights: Floats, weight: Tensor) -> Tensor:
        """The weighted sum of orders, as matrices, by the one noise; where both sides differ, term by term."""
        by_rows, by_columns = self.sides
        signed, common = self._signed(weights), self.shared()
        if by_rows and by_columns:
            out = common.new_zeros(self.shape)
            for direction in np.flatnonzero(weights).tolist():
                out.add_(self._ordered(direction), alpha=signed[direction].item())
            return out
        if by_rows:
            places = _summed(self._row_orders(), signed)[:, : common.shape[0]]
            return torch.mm(places, common.flatten(1)).view(self.shape)
        places = _summed(self._column_orders(), signed)[:, : common.shape[1]]
        total: Tensor = torch.tensordot(common, places, ([1], [1]))
        return total.movedim(-1, 1).contiguous()

    def source(self, weights: Floats) -> Source | None:
        """Of orders of rows a product of two matrices, of them and of the noise; of others there is none."""
        if self.sides != (True, False):
            return None
        common = self.shared()
        places = _summed(self._row_orders(), self._signed(weights))[:, : common.shape[0]]
        return Product(places.t(), common.flatten(1))

    def _signed(self, weights: Floats) -> Tensor:
        """The weights of directions with their signs: what their orders are multiplied by."""
        short, signs = self.short(weights), self._signs(self.dtype)
        return short if signs is None else short * signs


def _with_zero(tensor: Tensor, axis: int, lines: int) -> Tensor:
    """The tensor with a line of zeros at the end of an axis, if it has fewer than `lines`."""
    if tensor.shape[axis] == lines:
        return tensor
    shape = list(tensor.shape)
    shape[axis] = 1
    return torch.cat([tensor, tensor.new_zeros(shape)], axis)


def _summed(orders: Tensor, weights: Tensor) -> Tensor:
    """The sum of weights times orders as matrices: element (i, order[i]) is 1."""
    count = orders.shape[1]
    places = orders + torch.arange(count, device=orders.device) * count
    matrix = weights.new_zeros(count * count)
    matrix.index_add_(0, places.flatten(), weights.repeat_interleave(count))
    return matrix.view(count, count)
