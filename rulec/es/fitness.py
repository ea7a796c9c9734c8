"""The fitness of members: shaping, the weights of directions that follow from it, and the report of an update."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
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
    counted = int(finite.all(axis=0).sum())
    dropped = int(finite.size - finite.sum())
    if counted < (1 if perturbation.antithetic else 2):
        return Weights(perturbation, np.zeros(perturbation.directions), 0, dropped)
    result = Weights(perturbation, worse(fitness, perturbation, shaping), counted, dropped)
    most = np.finfo(np.float32).max
    if not all((np.abs(result.of(each)) <= most).all() for each in (perturbation, *others)):
        title = "fitness" if shaping is None else f"what shaping={shaping!r} makes of it"
        raise TensorError(f"{title} is not a number or too large for an estimate in float32: scale it down")
    return result


def worse(fitness: Any, perturbation: Perturbation, shaping: Any, xp: Any = np) -> Any:
    """How much worse each direction did than its opposite, or than the mean of the others, after shaping.

    (directions,) of a library `xp` of NumPy's names; 0 for a direction with a member whose fitness is not finite.
    """
    whole = xp.isfinite(fitness).all(axis=0)
    shaped = shape_fitness(xp.where(whole, fitness, xp.nan), shaping, xp)
    if perturbation.antithetic:
        score = shaped[0] / 2 - shaped[1] / 2
    else:
        count = whole.sum()
        score = (shaped[0] - xp.mean(shaped[0], where=whole)) * (count / (count - 1))
    return xp.where(whole, -score, 0.0)


def shape_fitness(fitness: Any, shaping: Any, xp: Any = np) -> Any:
    """Fitness as `shaping` makes it, NaN where it is NaN; HyperError for a shaping that there is not."""
    if shaping is None:
        return fitness
    if callable(shaping):
        shaped = xp.asarray(shaping(fitness.copy()), fitness.dtype)
        if shaped.shape != fitness.shape:
            raise TensorError(
                f"shaping made {shaped.shape} of fitness of shape {fitness.shape}: it must keep the shape"
            )
        return shaped
    if shaping not in SHAPINGS:
        raise HyperError(
            f"shaping={shaping!r} is none of {', '.join(SHAPINGS)}, a function or None"
            f"{did_you_mean(str(shaping), SHAPINGS)}"
        )
    return SHAPINGS[shaping](fitness, xp)


# No shape depends on the numbers: a library may trace them.


def centered_rank(fitness: Any, xp: Any = np) -> Any:
    """Ranks from -1/2 to 1/2; equal ones share the mean of theirs (Salimans et al., arXiv 1703.03864)."""
    flat = fitness.reshape(-1)
    ordered = xp.sort(flat)
    first, after = (xp.searchsorted(ordered, flat, side=side) for side in ("left", "right"))
    last = xp.maximum(1, (~xp.isnan(flat)).sum() - 1)
    ranks = (first + after - 1) / 2 / last - 0.5
    return xp.where(xp.isnan(flat), xp.nan, ranks).reshape(fitness.shape)


def zscore(fitness: Any, xp: Any = np) -> Any:
    """Fitness less its mean, in standard deviations; all 0 where nothing differs."""
    centred, spread = fitness - xp.nanmean(fitness), xp.nanstd(fitness)
    return xp.where(spread > 0, centred / xp.where(spread > 0, spread, 1.0), centred * 0.0)


def ars_top(fitness: Any, xp: Any = np) -> Any:
    """Fitness of the best directions, in its standard deviations, and nothing of the others.

    As Augmented Random Search has it (Mania et al., arXiv 1803.07055): directions are ordered by their better member,
    and `TOP` of them are kept. The others weigh nothing, and those kept as much as if there were no others.
    """
    best = xp.max(fitness, axis=0)
    there = (~xp.isnan(best)).sum()
    place = xp.argsort(xp.argsort(-best, stable=True), stable=True)
    count = xp.maximum(1, xp.round(TOP * there))
    scores = zscore(xp.where(place < count, fitness, xp.nan), xp) * (there / count)
    return xp.where(xp.isnan(fitness), xp.nan, xp.where(place < count, scores, 0.0))


SHAPINGS: dict[str, Callable[[Any, Any], Any]] = {"centered_rank": centered_rank, "zscore": zscore, "ars_top": ars_top}


@dataclass(frozen=True)
class Report:
    """The update of one step, by number from 0.

    `directions` counted; `dropped` members had no finite fitness. Where too few were left the step was `skipped`:
    nothing was estimated. `unused` are the names of parameters that no forward of the step came by: they have no
    gradient. `fused` are the names of parameters that were updated from their noise, without a gradient. The gradients
    of the others took `gradient_bytes`.
    """

    step: int
    directions: int
    dropped: int = 0
    skipped: bool = False
    unused: tuple[str, ...] = ()
    fused: tuple[str, ...] = ()
    gradient_bytes: int = 0


def skipped(step: int, dropped: int, members: int, stacklevel: int) -> Report:
    """The report of a step in which too few members had a finite fitness; a RuntimeWarning says so."""
    warnings.warn(
        f"step {step} is skipped: {dropped} of {members} members have no finite fitness; nothing is updated",
        RuntimeWarning, stacklevel=stacklevel + 1,
    )  # fmt: skip
    return Report(step, 0, dropped, skipped=True)
