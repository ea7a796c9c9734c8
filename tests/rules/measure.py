"""How far two sides of a comparison part, and the manual's table of it: `python -m tests.rules.measure`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tests.rules.peer import Peer
from tests.rules.peers import PEERS
from tests.rules.runs import Array, Hyper, OracleRun, OurRun, Run, our_run

STEPS = 25
Shapes = tuple[tuple[int, ...], ...]
SHAPES: Shapes = ((5,), (3, 4), ())

#: From no dimension to four: what rules that reduce are compared on.
ALL_DIMENSIONS: Shapes = (*SHAPES, (2, 3, 4), (4, 2, 3, 2))


@dataclass(frozen=True)
class Trial:
    """Parameters and gradients of one comparison, the same numbers in every dtype that can hold them.

    Gradients have both signs, sizes from 0.01 to 10, zeros here and there, and one element that stays zero for the
    first three steps.
    """

    dtype: str
    steps: int = STEPS
    shapes: Shapes = SHAPES

    @cached_property
    def _numbers(self) -> tuple[list[Array], list[list[Array]]]:
        rng = np.random.default_rng(20)
        params = [self._cast(rng.normal(size=shape)) for shape in self.shapes]
        grads = []
        for k in range(self.steps):
            drawn = [rng.normal(size=s) * 10 ** rng.uniform(-2, 1, size=s) for s in self.shapes]
            drawn = [np.where(rng.random(size=s) < 0.1, 0, g) for g, s in zip(drawn, self.shapes, strict=True)]
            if k < 3:
                drawn[0][0] = 0
            grads.append([self._cast(g) for g in drawn])
        return params, grads

    def _cast(self, numbers: Array) -> Array:
        return np.asarray(np.asarray(numbers, dtype=np.float32), dtype=self.dtype)

    @property
    def params(self) -> list[Array]:
        """The parameters at the start."""
        return [p.copy() for p in self._numbers[0]]

    def moves(self, hyper: Hyper) -> Iterator[tuple[list[Array], dict[str, float]]]:
        """Gradients and hyper-parameters of each step; the learning rate changes where `hyper` names one."""
        for k, grads in enumerate(self._numbers[1]):
            lr = {"lr": hyper["lr"] * (1 + 0.5 * math.cos(k))} if "lr" in hyper else {}
            yield [g.copy() for g in grads], {**hyper, **lr}


@dataclass(frozen=True)
class Difference:
    """How far two runs parted at most, over all steps.

    `relative` is in parts of the largest magnitude the tensor has had so far. `ulps` is in units in the last place
    of the largest magnitude the element has had so far, in the dtype of the trial.
    """

    relative: float
    ulps: float


def largest_difference(ours: Run, theirs: Run, trial: Trial, hyper: Hyper) -> Difference:
    """Step both sides through a trial; fails where either gives a value that is not finite."""
    sizes = [np.abs(p.astype(np.float64)) for p in trial.params]
    relative = ulps = 0.0
    for grads, now in trial.moves(hyper):
        ours.step(grads, now)
        theirs.step(grads, now)
        for index, (a, b) in enumerate(zip(ours.params(), theirs.params(), strict=True)):
            assert np.isfinite(a).all()
            assert np.isfinite(b).all()
            a, b = a.astype(np.float64), b.astype(np.float64)
            sizes[index] = np.maximum(sizes[index], np.abs(b))
            relative = max(relative, float(np.max(np.abs(a - b)) / (np.max(sizes[index]) or 1)))
            ulps = max(ulps, float(np.max(np.abs(a - b) / np.spacing(sizes[index].astype(trial.dtype)))))
    return Difference(relative, ulps)


def against_peer(peer: Peer, dtype: str, backend: str, *, shipped: bool = False) -> Difference:
    """The largest difference between our side, on a backend or by the reference, and theirs."""
    trial = Trial(dtype)
    ours = our_run(peer.ours(), trial.params, peer.hyper, backend)
    return largest_difference(ours, peer.start(trial.params, peer.hyper, shipped=shipped), trial, peer.hyper)


def against_reference(peer: Peer, trial: Trial) -> Difference:
    """The largest difference between our side on the numpy backend, in the trial's dtype, and the float64 reference."""
    rule = peer.ours()
    ours = OurRun(rule, trial.params, peer.hyper, "numpy")
    return largest_difference(ours, OracleRun(rule, trial.params, "float64", peer.hyper), trial, peer.hyper)


def table(peers: Sequence[Peer] = PEERS, backend: str = "numpy") -> str:
    """The comparison as a Markdown table: rule, peer, largest differences, notes."""
    lines = [
        f"| rule | compared with | float64, relative | float32, ulp | remarks ({STEPS} steps) |",
        "|---|---|---|---|---|",
    ]
    for peer in peers:
        wide, narrow = against_peer(peer, "float64", backend), against_peer(peer, "float32", backend)
        note = peer.note
        if peer.rounds:
            note += f" (as shipped: {against_peer(peer, 'float64', backend, shipped=True).relative:.1e})"
        lines.append(f"| `{peer.composed}` | `{peer.theirs}` | {wide.relative:.1e} | {narrow.ulps:.1f} | {note} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
