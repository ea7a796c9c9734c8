"""Whether noise is lost where it is added: a weight of few bits, or a large one, rounds to itself."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from rulec.es.perturbation import Perturbation
from rulec.es.streams import Stream

Floats = np.ndarray[Any, np.dtype[np.float64]]

#: Elements of each array that are looked at, and the share of lost ones from which there is a warning.
SAMPLE, _SHARE = 4096, 0.1

#: Significant bits by dtype, and the exponent of the smallest number that has them all.
_BITS = {"float64": (53, -1022), "float32": (24, -126), "bfloat16": (8, -126), "float16": (11, -14)}


def places(size: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The elements of an array of `size` that are looked at, by number."""
    return np.arange(0, size, max(1, size // SAMPLE))[:SAMPLE]


def rounded(numbers: Floats, dtype: str) -> Floats:
    """Numbers rounded to the nearest of a dtype, in float64; those too large for it stay finite."""
    if dtype == "float64":
        return numbers
    bits, least = _BITS[dtype]
    exponent = np.maximum(np.frexp(numbers)[1], least + 1) - bits
    return np.asarray(np.ldexp(np.rint(np.ldexp(numbers, -exponent)), exponent))


def warn_of_lost_noise(perturbation: Perturbation, samples: Sequence[tuple[Floats, str]], stacklevel: int = 2) -> None:
    """Warns where adding noise to many weights gives the same weights again.

    `samples` are elements of each array, at `places`, with its dtype. Only floating-point numbers of 16 to 64 bits are
    looked at. Dropout is not: its noise is as large as the weights.
    """
    if perturbation.family == "dropout":
        return
    noise = Stream(perturbation.seed_or_0, 0, 0, 0).values(perturbation.values, SAMPLE)
    lost = [(_lost(sample, perturbation.sigma * noise, dtype), dtype) for sample, dtype in samples if dtype in _BITS]
    share = sum(mask.sum() for mask, _ in lost) / max(1, sum(mask.size for mask, _ in lost))
    if share > _SHARE:
        worst = max(lost, key=lambda each: int(each[0].sum()))[1]
        outputs = "" if perturbation.family == "spsa" else ", and outputs of layers about as often"
        warnings.warn(
            f"sigma={perturbation.sigma} is too small for {worst}: {share:.0%} of weights (of a sample) round to "
            f"themselves when noise is added{outputs}; give a larger sigma, or parameters of more bits",
            RuntimeWarning, stacklevel=stacklevel + 1,
        )  # fmt: skip


def _lost(weights: Floats, noise: Floats, dtype: str) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Whether each weight stays as it is, among the weights with noise other than zero."""
    noise = noise[: weights.size]
    return np.asarray((rounded(weights + noise, dtype) == weights)[noise != 0])
