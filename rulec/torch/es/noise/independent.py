"""Noise of its own for each direction and element. It is never kept: every product makes it again, in tiles."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from rulec.es import families
from rulec.es.fitness import Floats
from rulec.es.streams import NOISE
from rulec.torch.es.layers import Map
from rulec.torch.es.noise.base import AddedNoise, RowSource, Source
from rulec.torch.es.population import Population, blocks, combined, whole

#: Elements of noise that are there at a time.
TILE = 1 << 20


class Tiled(AddedNoise):
    """Products by tiles of noise: of several directions, or of some outputs of one."""

    def add(self, base: Tensor, x: Tensor, way: Map, who: Population) -> Tensor:
        """Tile by tile."""
        out, each = whole(base, who), self.wide * self.window.numel()
        height = way.piece(self.rows, TILE // each)
        for some in blocks(len(self.directions), max(1, TILE // (self.rows * each))):
            lines = x[:, :, some.start : some.stop] if x.shape[2] > 1 else x
            there = out[:, :, some.start : some.stop]
            group = Population(who.signs, who.repeats, len(some), who.scales)
            for outputs in blocks(self.rows, height):
                tile = self.tile(some, outputs).to(out.dtype)
                part, inputs = way.narrowed(lines, outputs, self.rows)
                combined(there.narrow(way.axis, outputs.start, len(outputs)), part.each(inputs, tile), group)
        return out

    def tile(self, directions: range, outputs: range) -> Tensor:
        """The noise of some outputs of some directions, (directions, outputs, wide, *window)."""
        each = self.wide * self.window.numel()
        noise = self.draws.elements(directions, NOISE, len(outputs) * each, outputs.start * each)
        return noise.view(len(directions), len(outputs), self.wide, *self.window)

    def lookup(self, index: Tensor) -> Tensor:
        """Only the lines that are asked for are made."""
        elements = index.unsqueeze(-1) * self.wide + torch.arange(self.wide, device=index.device)
        return self.draws.at(self.pairs(index).unsqueeze(-1), NOISE, elements)


class Independent(Tiled, families.Independent):
    """The families `independent` and `spsa`, and any family for arrays of fewer than two dimensions."""

    def of_bias(self) -> Tensor:
        """The noise of a bias, (directions, rows): kept, as it is no more than a factor, where other noise is."""
        make = partial(self.draws.values, self.directions, NOISE, self.shape)
        return make() if self.perturbation.family in ("independent", "sparse") else self.kept("bias", make)

    def source(self, weights: Floats) -> Source | None:
        """The noise itself, made where the kernel needs it."""
        return self.draws.noise(weights)


class Sparse(Tiled, families.Sparse):
    """Noise of some columns of each direction, the others have none."""

    def source(self, weights: Floats) -> Source | None:
        """Made some rows at a time."""
        return RowSource(self.dtype, partial(self._rows, self.draws.weights(weights)))

    def chosen(self, directions: Sequence[int]) -> Tensor:
        """The same, kept."""
        make = super().chosen
        return self.every("chosen", lambda every: make(every).contiguous(), directions, None)

    def lines(self, of: str, directions: Sequence[int], purpose: int, dtype: torch.dtype | None = None) -> Tensor:
        """Not kept: the chosen columns are."""
        lines: Tensor = families.Family.lines(self, of, directions, purpose)
        return lines

    def add(self, base: Tensor, x: Tensor, way: Map, who: Population) -> Tensor:
        """As independent noise, but of the chosen inputs alone."""
        return super().add(base, way.take(x, way.inputs_of(self.chosen(self.directions), self.columns)), way, who)

    def tile(self, directions: range, outputs: range) -> Tensor:
        """Scaled."""
        return super().tile(directions, outputs).mul_(self.perturbation.scale_of(self.rows, self.columns))

    def lookup(self, index: Tensor) -> Tensor:
        """Lines of the chosen columns, in their places."""
        lines = super().lookup(index) * self.perturbation.scale_of(self.rows, self.columns)
        places = self.across(self.chosen(self.directions), index)
        return lines.new_zeros(*index.shape, self.columns).scatter_(-1, places.expand_as(lines), lines)

    def summed(self, weights: Tensor, weight: Tensor) -> Tensor:
        """Tile by tile of rows."""
        out = torch.empty(self.shape, dtype=self.dtype, device=self.draws.device)
        for outputs in blocks(self.rows, max(1, TILE // (self.wide * self.window.numel()))):
            self._rows(weights, slice(outputs.start, outputs.stop), out[outputs.start : outputs.stop])
        return out

    def _rows(self, weights: Tensor, span: slice, out: Tensor) -> None:
        """Writes some rows of the gradient, direction by direction."""
        part, outputs = out.view(-1, *self.shape[1:]).zero_(), range(*span.indices(self.rows))
        chosen = self.chosen(self.directions)
        for direction, a in enumerate(weights.tolist()):
            if a:
                part.index_add_(1, chosen[direction], self.tile(range(direction, direction + 1), outputs)[0], alpha=a)
