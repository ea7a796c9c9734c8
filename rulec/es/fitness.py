"""From the fitness of members to the weights of directions, and how fitness may be shaped before."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rulec.errors import HyperError, TensorError
from rulec.es.perturbation import Perturbation
from rulec.language.source import did_you_mean

Floats = np.ndarray[Any, np.dtype[np.float64]]

#: Takes fitness by (sign, direction) and gives as many numbers; what was not finite is NaN in both.
Shaping = str | Callable[[Floats], Floats] | None

#: The share of directions that `ars_top` keeps: those whose better member is best.
TOP = 0.5


@dataclass(frozen=True)
class Weights:
    """The factor of each direction's noise: (directions,) in float64, 0 for a direction that counts for nothing.

    `scores` are how much worse each did; `counted` directions count, `dropped` members had no finite fitness. The
    weighted sum of noise is the gradient of minus the fitness. `values` are the weights for `perturbation`.
    """

    perturbation: Perturbation
    scores: Floats
    counted: int
    dropped: int

    @property
    def values(self) -> Floats:
        """The weights."""
        return self.of(self.perturbation)

    def of(self, perturbation: Perturbation) -> Floats:
        """The weights for another perturbation of the same members."""
        return np.asarray(self.scores / (max(1, self.counted) * perturbation.size))

    @property
    def empty(self) -> bool:
        """Whether too few directions are left for an estimate: nothing is to be updated."""
        return self.counted == 0


def weights(
    fitness: Floats, perturbation: Perturbation, shaping: Shaping = None, others: Iterable[Perturbation] = ()
) -> Weights:
    """Weights of directions from fitness by (sign, direction), which is to be maximised.

    Without shaping the weighted sum of noise has the gradient of minus the smoothed fitness as its mean. A direction
    with a member whose fitness is not finite counts for nothing. TensorError where a weight is not finite in
    float32, for this perturbation or one of the `others` of the same members.
    """
    finite = np.isfinite(fitness)
    whole = np.asarray(finite.all(axis=0))
    counted = int(whole.sum())
    dropped = int(finite.size - finite.sum())
    if counted < (1 if perturbation.antithetic else 2):
        return Weights(perturbation, np.zeros(perturbation.directions), 0, dropped)
    shaped = shape_fitness(np.where(whole, fitness, np.nan), shaping)
    score = _contrast(shaped, whole, perturbation.antithetic)
    result = Weights(perturbation, np.where(whole, -score, 0.0), counted, dropped)
    most = np.finfo(np.float32).max
    if not all((np.abs(result.of(each)) <= most).all() for each in (perturbation, *others)):
        title = "fitness" if shaping is None else f"what shaping={shaping!r} makes of it"
        raise TensorError(f"{title} is not a number or too large for an estimate in float32: scale it down")
    return result


def _contrast(shaped: Floats, whole: np.ndarray[Any, np.dtype[np.bool_]], antithetic: bool) -> Floats:
    """The advantage of each direction over its opposite, or over the mean of the others."""
    if antithetic:
        return np.asarray(shaped[0] / 2 - shaped[1] / 2)
    count = int(whole.sum())
    return np.asarray((shaped[0] - np.mean(shaped[0], where=whole)) * count / (count - 1))


def shape_fitness(fitness: Floats, shaping: Shaping) -> Floats:
    """Fitness as `shaping` makes it, NaN where it is NaN; HyperError for a shaping that there is not."""
    shaped: Floats = shaped_by(fitness, shaping, SHAPINGS, lambda numbers: np.asarray(numbers, np.float64))
    return shaped


def shaped_by(
    fitness: Any, shaping: str | Callable[[Any], Any] | None, known: Mapping[str, Callable[[Any], Any]],
    array: Callable[[Any], Any],
) -> Any:  # fmt: skip
    """The same in any library: `known` are its shapings by name, `array` makes an array of a function's result."""
    if shaping is None:
        return fitness
    if callable(shaping):
        shaped = array(shaping(fitness.copy()))
        if shaped.shape != fitness.shape:
            raise TensorError(
                f"shaping made {shaped.shape} of fitness of shape {fitness.shape}: it must keep the shape"
            )
        return shaped
    if shaping not in known:
        raise HyperError(
            f"shaping={shaping!r} is none of {', '.join(known)}, a function or None{did_you_mean(str(shaping), known)}"
        )
    return known[shaping](fitness)


def centered_rank(fitness: Floats) -> Floats:
    """Ranks from -1/2 to 1/2; equal ones share the mean of theirs (Salimans et al., arXiv 1703.03864)."""
    flat = fitness.reshape(-1)
    there = ~np.isnan(flat)
    ranks = np.full(flat.shape, np.nan)
    _, inverse, counts = np.unique(flat[there], return_inverse=True, return_counts=True)
    below = np.cumsum(counts) - counts
    mean_rank = below + (counts - 1) / 2
    ranks[there] = mean_rank[inverse] / max(1, int(there.sum()) - 1) - 0.5
    return ranks.reshape(fitness.shape)


def zscore(fitness: Floats) -> Floats:
    """Fitness less its mean, in standard deviations; all 0 where nothing differs."""
    return _over(fitness - np.nanmean(fitness), float(np.nanstd(fitness)))


def ars_top(fitness: Floats) -> Floats:
    """Fitness of the best directions, in its standard deviations, and nothing of the others.

    As Augmented Random Search has it (Mania et al., arXiv 1803.07055): directions are ordered by their better member,
    and `TOP` of them are kept. The others weigh nothing, and those kept as much as if there were no others.
    """
    best = np.max(fitness, axis=0)
    there = np.flatnonzero(~np.isnan(best))
    kept = there[np.argsort(-best[there], kind="stable")[: max(1, round(TOP * there.size))]]
    chosen = fitness[:, kept]
    mean, spread = float(chosen.mean()), float(chosen.std())
    scores = np.where(np.isnan(fitness), np.nan, 0.0)
    scores[:, kept] = _over(chosen - mean, spread) * (there.size / kept.size)
    return scores


def _over(numbers: Floats, spread: float) -> Floats:
    return numbers / spread if spread > 0.0 else numbers * 0.0


SHAPINGS: dict[str, Callable[[Floats], Floats]] = {
    "centered_rank": centered_rank, "zscore": zscore, "ars_top": ars_top,
}  # fmt: skip
