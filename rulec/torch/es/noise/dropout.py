"""Members that drop inputs: each computes a window of a ring of inputs alone, and windows overlap."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import torch
from torch import Tensor

from rulec.es import families
from rulec.es.families.simple import window_start
from rulec.torch.es.layers import Map
from rulec.torch.es.noise.base import LayerNoise
from rulec.torch.es.population import Population, blocks

#: Neighbours in the ring are taken together, for products of as many rows as this, but no more of them than widen their
#: windows' union by this share of the inputs.
_ROWS, _SHARE = 64, 1 / 8

#: Rows of as many products as are called together.
_CALL = 512


@dataclass(frozen=True)
class Run:
    """Neighbours, of one sign, and where in the ring, twice over, they see something.

    The windows of `some` directions begin at `first` and these `offsets`, and end before `stop`.
    """

    sign: int
    some: range
    first: int
    stop: int
    offsets: tuple[int, ...]

    @cached_property
    def shape(self) -> str:
        """A key of the run's windows: runs of one key have the same gains."""
        return f"{self.stop - self.first} {self.offsets}"


class Dropout(LayerNoise, families.Dropout):
    """Products by windows of the ring alone."""

    def _twice(self) -> Tensor:
        """The inputs in this step's order, twice over: every window is a run of it."""
        make = super().ring
        # Numbers of 32 bits, by which torch selects several times as fast.
        return self.kept("ring", lambda: make().int().repeat(2))

    def ring(self) -> Tensor:
        """The same, kept."""
        return self._twice()[: self.columns]

    def place(self) -> Tensor:
        """The same, kept."""
        return self.kept("place", super().place)

    def apply(self, x: Tensor, weight: Tensor, bias: Tensor | None, way: Map, who: Population) -> Tensor:
        """Products by runs of the weight in the ring's order, each of some neighbours' rows."""
        once = who.signs == 2 and who.directions % 2 == 0 and x.shape[0] == x.shape[2] == 1
        rows = max(1, x[0, :, 0].numel() // x.shape[way.axis])
        calls = _calls(who.directions, 1 if once else who.signs, self.columns, self.kept_inputs, rows)
        turned = weight.index_select(1, self._twice()[: max(run.stop for runs in calls for run in runs)])
        out = way.outputs(x, weight, who.lead)
        for runs in calls:
            first, last = runs[0], runs[-1]
            step = runs[1].first - first.first if len(runs) > 1 else 0
            part = out[first.sign : first.sign + 1, :, first.some.start : last.some.stop]
            way.windows(self._seen(x, runs, way), turned[:, first.first : last.stop], step, bias, part)
        if once:
            # The window of direction d in one sign is that of d + D/2 in the other.
            half = who.directions // 2
            out[1, :, half:], out[1, :, :half] = out[0, :, :half], out[0, :, half:]
        return out

    def _seen(self, x: Tensor, runs: Sequence[Run], way: Map) -> Tensor:
        """The inputs in runs of the ring, as members see them: (runs, repeats, neighbours, ...)."""
        indices = [way.inputs_of(self._twice()[run.first : run.stop], self.columns) for run in runs]
        chosen = [way.chosen(_of(x, run.sign, run.some), index) for run, index in zip(runs, indices, strict=True)]
        gains = way.spread(way.of_columns(self._gains(runs[0]).to(x.dtype)), chosen[0])
        seen = x.new_empty(len(runs), x.shape[1], len(runs[0].some), *chosen[0].shape[3:])
        for part, inputs in zip(torch.split(seen, 1), chosen, strict=True):
            torch.mul(inputs, gains, out=part)
        return seen

    def _gains(self, run: Run) -> Tensor:
        """The gains of the inputs of a run, for each of its members: (members, length)."""
        return self.kept(run.shape, lambda: self._make_gains(run))

    def _make_gains(self, run: Run) -> Tensor:
        device = self.draws.device
        places = torch.arange(run.stop - run.first, device=device)
        places = places - torch.tensor(run.offsets, device=device).unsqueeze(1)
        seen = (places >= 0) & (places < self.kept_inputs)
        gains: Tensor = seen.to(self.dtype) * (self.columns / self.kept_inputs)
        return gains


def _of(x: Tensor, sign: int, some: range) -> Tensor:
    """The rows of some directions of one sign, where members have rows of their own."""
    one = x[sign : sign + 1] if x.shape[0] > 1 else x
    return one[:, :, some.start : some.stop] if one.shape[2] > 1 else one


@cache
def _calls(directions: int, signs: int, columns: int, kept: int, rows: int) -> tuple[tuple[Run, ...], ...]:
    """All members' windows: runs that are alike and follow one another by equal steps are together.

    `rows` are those of a member.
    """
    together = min(-(-_ROWS // rows), int(_SHARE * directions), (columns - kept) * directions // columns)
    size = max(1, directions // columns, together)
    most = max(1, _CALL // (size * rows))
    calls: list[list[Run]] = []
    for sign in range(signs):
        for some in blocks(directions, size):
            run = _run(sign, some, directions, columns, kept)
            if calls and len(calls[-1]) < most and _follows(calls[-1], run):
                calls[-1].append(run)
            else:
                calls.append([run])
    return tuple(map(tuple, calls))


def _run(sign: int, some: range, directions: int, columns: int, kept: int) -> Run:
    starts = [window_start(d, directions, columns) + sign * kept for d in some]
    offsets = tuple(start - starts[0] for start in starts)
    first = starts[0] % columns
    return Run(sign, some, first, first + offsets[-1] + kept, offsets)


def _follows(runs: Sequence[Run], run: Run) -> bool:
    """Whether a run is the next of these."""
    last, step = runs[-1], run.first - runs[-1].first
    alike = run.sign == last.sign and run.offsets == last.offsets and step > 0
    return alike and (len(runs) == 1 or step == last.first - runs[-2].first)
