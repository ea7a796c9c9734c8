"""Binary weights: their probabilities, their draws, and the gradient of the expected fitness.

A weight is 1 with probability p = sigmoid(z), where z = sharpness*theta/(mean|theta| + 1e-5): scaled so, weights are as
certain on the average all through training (NESgpu has 5). The gradient of the expected fitness in z is the mean of
fitness times (bit - p). It has no division and so nothing overflows. The gradient in theta follows by the chain rule,
through the mean too. Estimates get a weight for each member where they know its own score, and not only the difference
of a pair.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from rulec.backend.capabilities import Bits
from rulec.errors import TensorError
from rulec.es.binary.kernels import contiguous, kernels_of
from rulec.es.fitness import Shaping, shape_fitness

Array = np.ndarray[Any, Any]

#: How certain weights are: of one of mean magnitude, z.
SHARPNESS = 5.0

#: What is added to the mean magnitude, so that weights of zero are even chances.
_LEAST = 1e-5

#: The words of a bit's draw.
_WORDS = 2.0**32


def logits(theta: Any, sharpness: float | None = SHARPNESS) -> Any:
    """z for each of `theta`, float64; theta itself where `sharpness` is None. TensorError where one is not finite."""
    wide = theta.astype(np.float64)
    scale = _scale(wide, sharpness)
    return wide if sharpness is None else wide * scale


def thresholds(z: Any) -> Any:
    """For each bit the word below which it is 1, floor(sigmoid(z)*2**32), uint32; never 0, or weights would stay 0."""
    p = 0.5 + 0.5 * np.tanh(0.5 * z)
    return np.clip(np.floor(p * _WORDS), 1.0, _WORDS - 1.0).astype(np.uint32)


def draw(theta: Any, bits: Bits, sharpness: float | None = SHARPNESS, *, backend: str | None = None) -> Any:
    """Each member's weights, uint64 (members, *shape[:-1], words): bits of theta's last axis, packed.

    Equal thresholds give equal bits on every backend.
    """
    limits = thresholds(logits(theta, sharpness))
    return kernels_of(limits, backend).draw(contiguous(limits), limits.shape, bits)


def likely(theta: Any) -> Any:
    """The most likely weights, booleans: 1 where theta is above 0."""
    return theta > 0


def score_gradient(
    theta: Any, words: Any, weights: Sequence[float] | Array, sharpness: float | None = SHARPNESS, *,
    backend: str | None = None,
) -> Any:  # fmt: skip
    """The sum over members of weight times the gradient of the logarithm of their bits' probability, float64.

    With `words` from `draw(theta, ...)` and `weights` from `member_weights` this is an estimate, without bias, of the
    gradient of minus the expected fitness.
    """
    factors = np.ascontiguousarray(weights, np.float64)
    wide = theta.astype(np.float64)
    z = logits(theta, sharpness)
    p = thresholds(z).astype(np.float64) / _WORDS
    summed = kernels_of(words, backend).weighted_sum(words, factors, theta.shape[-1])
    by_z = summed - math.fsum(factors.tolist()) * p
    if sharpness is None:
        return by_z
    # Each z depends on all of theta through the mean of their magnitudes.
    scale = _scale(wide, sharpness)
    return scale * (by_z - np.sign(wide) * (float((by_z * z).mean()) / sharpness))


def _scale(theta: Any, sharpness: float | None) -> float:
    """What theta is multiplied by."""
    size = float(np.abs(theta).mean()) if theta.size else 0.0
    if not math.isfinite(size):
        raise TensorError("the numbers behind binary weights are not all finite: lower the learning rate of their rule")
    return 1.0 if sharpness is None else sharpness / (size + _LEAST)


Floats = np.ndarray[Any, np.dtype[np.float64]]


def member_weights(fitness: Floats, shaping: Shaping = None) -> Floats:
    """Weights (members,) of sum zero from fitness by (sign, direction), which is to be maximised.

    A member's weight is minus its fitness, less the mean fitness of all other directions, over the number of members.
    The baseline does not depend on the member, so that the estimate has no bias. Directions with fitness that is not
    finite count for nothing. If fewer than two are left there is no baseline, all weights are 0 and a RuntimeWarning
    says so.
    """
    whole = np.isfinite(fitness).all(axis=0)
    count = int(whole.sum())
    if count < 2:
        warnings.warn(
            f"{count} of {whole.size} directions have finite fitness and binary layers need 2: they are not updated",
            RuntimeWarning, stacklevel=2,
        )  # fmt: skip
        return np.zeros(fitness.size)
    scores = np.where(whole, shape_fitness(np.where(whole, fitness, np.nan), shaping), 0.0)
    signs = len(fitness)
    baseline = (scores.sum() - scores.sum(axis=0)) / (signs * (count - 1))
    return np.where(whole, (baseline - scores) / (signs * count), 0.0).reshape(-1)
