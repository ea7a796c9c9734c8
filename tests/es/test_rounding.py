"""What is rounded away when noise is added: rounding beside that of other libraries, and who is warned of how much."""

from __future__ import annotations

import warnings

import ml_dtypes
import numpy as np
import pytest

from rulec.es import Perturbation
from rulec.es.perturbation import SAMPLE, places, rounded, warn_of_lost_noise

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_round_as_those_of_the_dtype(dtype: str) -> None:
    """Of all sizes, powers of two and ties, and those too small for all bits, among them."""
    info = ml_dtypes.finfo(DTYPES[dtype])
    rng = np.random.default_rng(0)
    least, most = int(info.minexp) - int(info.nmant) - 2, int(info.maxexp) - 2
    powers = 2.0 ** np.arange(least, most)
    ties = powers * (1.0 + float(info.eps) / 2)
    given = np.concatenate(
        [powers, ties, -3.0 * ties, rng.standard_normal(20000) * 2.0 ** rng.uniform(least, most, 20000)]
    )
    assert np.array_equal(rounded(given, dtype), given.astype(DTYPES[dtype]).astype(np.float64))


def test_places_are_spread_over_an_array() -> None:
    assert places(3).tolist() == [0, 1, 2]
    assert places(0).size == 0
    many = places(10 * SAMPLE + 7)
    assert (many.size, many[0], many[-1]) == (SAMPLE, 0, 10 * (SAMPLE - 1))


def said(perturbation: Perturbation, *samples: tuple[np.ndarray, str]) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        warn_of_lost_noise(perturbation, samples)
    return [str(each.message) for each in found]


def test_the_share_is_of_weights_that_noise_would_move() -> None:
    """By noise as large as a quarter of the gap of numbers above 1: what is between 1 and 2 stays, and zeros move."""
    perturbation = Perturbation("lowrank", 2, 2.0**-9, values="rademacher")
    half = np.concatenate([np.full(30, 1.5), np.zeros(70)])
    (message,) = said(perturbation, (half, "bfloat16"), (np.ones(100), "float32"))
    assert message.startswith("sigma=0.001953125 is too small for bfloat16: 15% of weights (of a sample) round to")
    assert "and outputs of layers about as often" in message
    (alone,) = said(Perturbation("spsa", 2, 2.0**-9, values="rademacher"), (half, "bfloat16"))
    assert "30% of weights" in alone
    assert "outputs" not in alone


def test_few_bits_or_large_weights_are_told_and_nothing_else() -> None:
    perturbation = Perturbation("independent", 2, 1e-3)
    large = 1e5 + 1000.0 * np.arange(100)
    assert not said(perturbation, (large, "float64"), (large / 1e6, "float32"), (large, "float8_e4m3fn"))
    assert "too small for float32" in said(perturbation, (large, "float32"))[0]
    assert not said(Perturbation("dropout", 2), (large, "float16"))
    assert not said(perturbation)
    assert not said(perturbation, (np.zeros(0), "float16"))


def test_noise_of_zero_moves_nothing_and_is_not_lost() -> None:
    popcount = Perturbation("independent", 2, 0.1, values="popcount")
    assert not said(popcount, (np.full(SAMPLE, 0.0625), "bfloat16"))
    assert (
        "100% of weights" in said(Perturbation("independent", 2, 1e-8, values="popcount"), (np.ones(50), "bfloat16"))[0]
    )
