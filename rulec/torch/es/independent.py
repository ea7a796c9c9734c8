"""Noise of its own for each direction and element. It is never kept: every product makes it again, in tiles."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rulec.backend.noise import Noise
from rulec.es.fitness import Floats
from rulec.es.streams import COLUMNS, NOISE, SCALE, short_weights
from rulec.torch.es.fill import fill
from rulec.torch.es.layer import LayerNoise, RowSource, Source
from rulec.torch.es.maps import Map
from rulec.torch.es.population import Population, blocks, combined, whole

#: Elements of noise that are there at a time.
TILE = 1 << 20


class Independent(LayerNoise):
    """The families `independent` and `spsa`, and any family for arrays of fewer than two dimensions."""

    def add(self, base: Tensor, x: Tensor, way: Map, who: Population) -> Tensor:
        """Products by tiles of noise: of several directions, or of some outputs of one."""
        out = whole(base, who)
        return self._add_tiles(out, x, way, who, self._columns)

    def _add_tiles(self, out: Tensor, x: Tensor, way: Map, who: Population, columns: int) -> Tensor:
        each = columns * self.kernel.numel()
        height = way.piece(self.rows, TILE // each)
        for some in blocks(len(self.directions), max(1, TILE // (self.rows * each))):
            lines = x[:, :, some.start : some.stop] if x.shape[2] > 1 else x
            there = out[:, :, some.start : some.stop]
            group = Population(who.signs, who.repeats, len(some), who.scales)
            for outputs in blocks(self.rows, height):
                tile = self._tile(some, outputs, columns).to(out.dtype)
                part, inputs = way.narrowed(lines, outputs, self.rows)
                combined(there.narrow(way.axis, outputs.start, len(outputs)), part.each(inputs, tile), group)
        return out

    def _tile(self, directions: range, outputs: range, columns: int) -> Tensor:
        """The noise of some outputs of some directions, (directions, outputs, columns, *kernel)."""
        each = columns * self.kernel.numel()
        noise = self.draws.values(NOISE, directions, len(outputs) * each, self.dtype, outputs.start * each)
        return noise.view(len(directions), len(outputs), columns, *self.kernel)

    @property
    def _columns(self) -> int:
        return self.columns

    def lookup(self, index: Tensor) -> Tensor:
        """Only the lines that are asked for are made."""
        return self._lines(index, self.columns)

    def _lines(self, index: Tensor, columns: int) -> Tensor:
        pairs = torch.arange(len(self.directions), device=index.device)
        pairs = pairs.view(-1, *(1,) * (index.dim() - 2))
        elements = index.unsqueeze(-1) * columns + torch.arange(columns, device=index.device)
        return self.draws.at(NOISE, pairs, elements, self.dtype)

    def vectors(self) -> Tensor:
        """The noise of a bias, (directions, rows): kept, as it is no more than a factor, where other noise is."""
        if self.perturbation.family in ("independent", "sparse"):
            return self._vectors()
        return self.kept("vectors", self._vectors)

    def _vectors(self) -> Tensor:
        return self.draws.values(NOISE, self.directions, self.shape.numel(), self.dtype)

    def dense(self, direction: int) -> Tensor:
        """One fill."""
        out = torch.empty(self.shape, dtype=self.dtype, device=self.draws.device)
        scale = np.array([SCALE[self.draws.kind]], np.float64 if self.dtype is torch.float64 else np.float32)
        fill(out, self._noise(scale, direction))
        return out

    def estimate(self, weights: Floats, weight: Tensor) -> Tensor:
        """One fill with all weights."""
        out = torch.empty(self.shape, dtype=self.dtype, device=self.draws.device)
        fill(out, self._sum(weights))
        return out

    def source(self, weights: Floats) -> Source | None:
        """The noise itself, made where the kernel needs it."""
        return self._sum(weights)

    def _sum(self, weights: Floats) -> Noise:
        return self._noise(short_weights(weights, self.draws.kind))

    def _noise(self, weights: np.ndarray[Any, Any], first: int = 0) -> Noise:
        d = self.draws
        return Noise(d.kind, d.seed, d.layer, d.step, weights, first)


class Sparse(Independent):
    """Noise of some columns of each direction, the others have none."""

    def source(self, weights: Floats) -> Source | None:
        """Made some rows at a time."""
        return RowSource(self.dtype, partial(self._rows, weights))

    @property
    def _columns(self) -> int:
        return self.perturbation.lines_of(self.rows, self.columns)[1]

    @property
    def _scale(self) -> float:
        return self.perturbation.scale_of(self.rows, self.columns)

    @property
    def chosen(self) -> Tensor:
        """The columns of each direction, (directions, chosen)."""
        return self.kept("chosen", self._choose)

    def _choose(self) -> Tensor:
        return self.draws.orders(COLUMNS, self.directions, self.columns)[:, : self._columns].contiguous()

    def add(self, base: Tensor, x: Tensor, way: Map, who: Population) -> Tensor:
        """As independent noise, but of the chosen inputs alone."""
        inputs = way.take(x, way.inputs_of(self.chosen, self.columns))
        return self._add_tiles(whole(base, who), inputs, way, who, self._columns)

    def _tile(self, directions: range, outputs: range, columns: int) -> Tensor:
        return super()._tile(directions, outputs, columns).mul_(self._scale)

    def lookup(self, index: Tensor) -> Tensor:
        """Lines of the chosen columns, in their places."""
        lines = self._lines(index, self._columns) * self._scale
        places = self.chosen.view(len(self.directions), *(1,) * (index.dim() - 3), self._columns)
        return lines.new_zeros(*index.shape, self.columns).scatter_(-1, places.expand_as(lines), lines)

    def dense(self, direction: int) -> Tensor:
        """Zero but for the chosen columns."""
        one = self._tile(range(direction, direction + 1), range(self.rows), self._columns)[0]
        return one.new_zeros(self.shape).index_copy_(1, self.chosen[direction], one)

    def estimate(self, weights: Floats, weight: Tensor) -> Tensor:
        """Tile by tile of rows."""
        out = torch.empty(self.shape, dtype=self.dtype, device=self.draws.device)
        for outputs in blocks(self.rows, max(1, TILE // (self._columns * self.kernel.numel()))):
            self._rows(weights, slice(outputs.start, outputs.stop), out[outputs.start : outputs.stop])
        return out

    def _rows(self, weights: Floats, span: slice, out: Tensor) -> None:
        """Writes some rows of the gradient, direction by direction."""
        short, part = self.short(weights), out.view(-1, *self.shape[1:]).zero_()
        outputs = range(*span.indices(self.rows))
        for direction in np.flatnonzero(weights).tolist():
            tile = self._tile(range(direction, direction + 1), outputs, self._columns)[0]
            part.index_add_(1, self.chosen[direction], tile, alpha=short[direction].item())
