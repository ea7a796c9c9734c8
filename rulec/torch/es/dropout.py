"""Members that drop inputs, which are not computed: each sees a window of a ring of inputs, and windows overlap."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rulec.es.streams import DROPPED, SHARED
from rulec.torch.es.layer import LayerNoise
from rulec.torch.es.maps import Map
from rulec.torch.es.population import Population, blocks

#: Neighbours in the ring are taken together: their windows' union is by a share of the inputs of this wider than one.
_SHARE = 16


class Dropout(LayerNoise):
    """Inputs in a window of the ring, scaled so that their mean stays; the other sign has the rest."""

    @property
    def kept_inputs(self) -> int:
        """How many inputs each member sees."""
        return self.perturbation.kept_of(self.columns)

    def _ring(self) -> Tensor:
        """The inputs in this step's order, twice over: every window is a run of it."""
        # Numbers of 32 bits, by which torch selects several times as fast.
        return self.kept("ring", lambda: self.draws.orders(DROPPED, [SHARED], self.columns)[0].int().repeat(2))

    def _start(self, direction: int, sign: int) -> int:
        """Where a member's window begins."""
        return direction * self.columns // len(self.directions) + sign * self.kept_inputs

    def apply(self, x: Tensor, weight: Tensor, bias: Tensor | None, way: Map, who: Population) -> Tensor:
        """Products by runs of the weight in the ring's order, each of some neighbours' rows."""
        ring, runs = self._ring(), list(self._runs())
        # Copied by whole inputs: runs of it are what products read fastest.
        by_input = weight.movedim(1, 0).contiguous()
        turned = by_input.index_select(0, ring[: max(run.stop for _, _, run in runs)]).movedim(0, 1)
        out: Tensor | None = None
        for sign, some, run in runs:
            lines = _of(x, sign, some).index_select(way.axis, way.inputs_of(ring[run.start : run.stop], self.columns))
            gains = self._gains(sign, some, len(run)).to(x.dtype)
            seen = lines * way.spread(way.of_columns(gains), lines)
            found = way.product(seen, turned[:, run.start : run.stop], bias)
            if out is None:
                out = found.new_empty(*who.lead, *found.shape[3:])
            out[sign : sign + 1, :, some.start : some.stop] = found
        assert out is not None
        return out

    def _runs(self) -> Iterator[tuple[int, range, range]]:
        """Signs, neighbours and the places in the ring, twice over, that they see some of."""
        count, kept = len(self.directions), self.kept_inputs
        size = min(count // _SHARE, (self.columns - kept) * count // self.columns)
        for sign in range(self.perturbation.signs):
            for some in blocks(count, max(1, size)):
                first, last = self._start(some.start, sign), self._start(some.stop - 1, sign)
                turn = first // self.columns * self.columns
                yield sign, some, range(first - turn, last - turn + kept)

    def _gains(self, sign: int, some: range, length: int) -> Tensor:
        """What each of some members multiplies the inputs of a run by: (members, length)."""
        first = self._start(some.start, sign)
        offsets = [self._start(d, sign) - first for d in some]
        return self.kept(f"gains {offsets}", lambda: self._make_gains(offsets, length))

    def _make_gains(self, offsets: list[int], length: int) -> Tensor:
        device = self.draws.device
        places = torch.arange(length, device=device) - torch.tensor(offsets, device=device).unsqueeze(1)
        seen = (places >= 0) & (places < self.kept_inputs)
        return seen.to(self.dtype) * (self.columns / self.kept_inputs)

    def add(self, base: Tensor, x: Tensor, way: Map, who: Population) -> Tensor:
        """Nothing is added: see `apply`."""
        raise NotImplementedError

    def lookup(self, index: Tensor) -> Tensor:
        """An embedding has no inputs to drop."""
        raise NotImplementedError

    def dense(self, direction: int) -> Tensor:
        """What inputs are multiplied by, less 1."""
        start, ring = self._start(direction, 0), self._ring()
        gains = torch.full((self.columns,), -1.0, dtype=self.dtype, device=self.draws.device)
        gains[ring[start : start + self.kept_inputs]] += self.columns / self.kept_inputs
        return gains.view(1, -1, *(1,) * len(self.kernel)).expand(self.shape)

    def gradient(self, weights: np.ndarray[Any, np.dtype[np.float64]], weight: Tensor) -> Tensor:
        """The gradient's part along the gains of inputs, which is all that dropping them can tell of it."""
        return weight.detach().to(self.dtype) * self._scales(weights, weight)

    def _scales(self, weights: np.ndarray[Any, np.dtype[np.float64]], weight: Tensor) -> Tensor:
        """What the weight is multiplied by, as it meets it."""
        short = self.short(weights)
        starts = torch.tensor([self._start(d, 0) for d in self.directions], device=weight.device)
        places = starts.unsqueeze(1) + torch.arange(self.kept_inputs, device=weight.device)
        sums = torch.zeros(self.columns, dtype=self.dtype, device=weight.device)
        sums.index_add_(0, self._ring()[places.flatten()], short.repeat_interleave(self.kept_inputs))
        total = sums * (self.columns / self.kept_inputs) - short.sum()
        others = [axis for axis in range(weight.dim()) if axis != 1]
        squares = weight.detach().to(self.dtype).square().sum(others)
        variance = self.columns / self.kept_inputs - 1.0
        scale = torch.where(squares > 0, total / (variance * squares), 0.0)
        return scale.view(1, -1, *(1,) * len(self.kernel))


def _of(x: Tensor, sign: int, some: range) -> Tensor:
    """The rows of some directions of one sign, where members have rows of their own."""
    one = x[sign : sign + 1] if x.shape[0] > 1 else x
    return one[:, :, some.start : some.stop] if one.shape[2] > 1 else one
