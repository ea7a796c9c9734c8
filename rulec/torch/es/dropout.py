"""Members that drop inputs, which are not computed: each sees a window of a ring of inputs, and windows overlap."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rulec.es.streams import DROPPED, SHARED
from rulec.torch.es.layer import LayerNoise
from rulec.torch.es.maps import Map
from rulec.torch.es.population import Population, blocks

#: Neighbours in the ring are taken together: their windows' union is by a share of the inputs of this wider than one.
_SHARE = 8

#: Some neighbouring directions, in one sign.
Members = tuple[int, range]


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
        turned = weight.index_select(1, ring[: max(run.stop for _, run in runs)])
        out: Tensor | None = None
        for members, run in runs:
            seen = self._seen(x, members, run, way)
            found = torch.split(way.product(seen, turned[:, run.start : run.stop], bias), x.shape[1], 1)
            if out is None:
                out = found[0].new_empty(*who.lead, *found[0].shape[3:])
            for place, (sign, some) in enumerate(members):
                out[sign : sign + 1, :, some.start : some.stop] = found[place % len(found)]
        assert out is not None
        return out

    def _seen(self, x: Tensor, members: Sequence[Members], run: range, way: Map) -> Tensor:
        """The inputs in a run of the ring, as members see them: one's rows behind the other's, or once for both."""
        alike = x.shape[0] == x.shape[2] == 1
        index = way.inputs_of(self._ring()[run.start : run.stop], self.columns)
        lines = [_of(x, sign, some).index_select(way.axis, index) for sign, some in members[: 1 if alike else None]]
        gains = way.spread(way.of_columns(self._gains(*members[0], len(run)).to(x.dtype)), lines[0])
        repeats, count = x.shape[1], len(members[0][1])
        seen = x.new_empty(1, len(lines) * repeats, count, *lines[0].shape[3:])
        for part, own in zip(torch.split(seen, repeats, 1), lines, strict=True):
            torch.mul(own, gains, out=part)
        return seen

    def _runs(self) -> Iterator[tuple[list[Members], range]]:
        """Neighbours and the places in the ring, twice over, that they see some of.

        Of an even number of pairs, the window of direction d in one sign is that of d + D/2 in the other: these are
        taken together.
        """
        count, kept = len(self.directions), self.kept_inputs
        size = max(1, min(count // _SHARE, (self.columns - kept) * count // self.columns))
        half = count // 2 if self.perturbation.signs == 2 and count % 2 == 0 else 0
        for sign in range(1 if half else self.perturbation.signs):
            for some in _blocks_of(count, half, size):
                first, last = self._start(some.start, sign), self._start(some.stop - 1, sign)
                turn = first // self.columns * self.columns
                other = (some.start + half) % count
                both = [(sign, some), (1, range(other, other + len(some)))]
                yield both[: 2 if half else 1], range(first - turn, last - turn + kept)

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


def _blocks_of(count: int, half: int, size: int) -> Iterator[range]:
    """Neighbours of so many directions, at most `size` together, and never of both halves where there are two."""
    for first in (0, half) if half else (0,):
        for some in blocks(half or count, size):
            yield range(first + some.start, first + some.stop)
