"""The random bits of elements: balanced, independent of neighbours, steps, tensors and seeds, for all places."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from rulec.array_api.bits import chance, chance_at, words_of

Array = np.ndarray[Any, Any]
SIZE = 1 << 20
LIKE = np.zeros((4, 1 << 9, 1 << 9), np.float32)


def numbers(seed: int = 0, number: int = 0, step: int = 1, draw: int = 0) -> Array:
    """The numbers of a tensor of SIZE elements, in the order of memory."""
    drawn: Array = chance(np, LIKE, *words_of(seed, number).values(), step, draw).reshape(-1)
    return drawn


STREAMS = {
    "first": {}, "step": {"step": 2}, "later": {"step": 3}, "tensor": {"number": 1}, "other": {"number": 2},
    "seed": {"seed": 1}, "upper half of the seed": {"seed": 1 << 16}, "draw": {"draw": 1}, "large": {"step": 2**24 - 1},
}  # fmt: skip


def far(values: Array, mean: float, deviation: float) -> float:
    """The distance of a mean from its expectation, in its standard deviations."""
    return float(abs(values.mean() - mean) / (deviation / np.sqrt(values.size)))


@pytest.mark.parametrize("words", STREAMS.values(), ids=[*STREAMS])
def test_every_number_and_every_bit_is_as_frequent(words: dict[str, int]) -> None:
    drawn = numbers(**words).astype(np.int64)
    assert drawn.min() >= 0
    assert drawn.max() < 1 << 16
    for bit in range(16):
        assert far(drawn >> bit & 1, 0.5, 0.5) < 4.5, bit
    for buckets in (256, 1 << 16):
        counts = np.bincount(drawn * buckets >> 16, minlength=buckets)
        expected = SIZE / buckets
        chi_square = ((counts - expected) ** 2 / expected).sum()
        assert abs(chi_square - (buckets - 1)) < 5 * np.sqrt(2 * (buckets - 1)), buckets


@pytest.mark.parametrize("lag", [1, 2, 3, 4, 8, 16, 64, 512, 1 << 16])
def test_neighbours_are_not_correlated(lag: int) -> None:
    """Also bit by bit: of two numbers, as many bits are equal as are not."""
    drawn = numbers()
    one, other = drawn[:-lag], drawn[lag:]
    assert abs(np.corrcoef(one, other)[0, 1]) < 4.5 / np.sqrt(one.size)
    different = one.astype(np.int64) ^ other.astype(np.int64)
    for bit in range(16):
        assert far(different >> bit & 1, 0.5, 0.5) < 4.5, bit


def test_streams_are_not_correlated() -> None:
    """Steps, tensors, seeds and draws: at each element, and each set against the others at its neighbours."""
    drawn = np.stack([numbers(**words).astype(np.float32) for words in STREAMS.values()])
    even = (drawn - np.float32(32767.5)) / np.float32(2**16 / np.sqrt(12))
    for lag in (0, 1, 64):
        products = even @ np.roll(even, lag, 1).T / np.sqrt(SIZE)
        if not lag:
            products -= np.diag(np.diag(products))
        assert np.abs(products).max() < 4.5, lag
    for one, other in itertools.combinations(drawn, 2):
        assert far(one == other, 2.0**-16, 2.0**-8) < 5


def test_the_numbers_of_one_element_over_many_steps_are_random_too() -> None:
    """The mean over the steps at each of some elements, and the numbers of neighbouring steps."""
    low, high, step = np.arange(64, dtype=np.uint32)[:, None], np.uint32(0), np.arange(1, 1 << 14)
    with np.errstate(over="ignore"):
        drawn = chance_at(np, low, high, (*words_of(0, 7).values(), step, 0))
    away = np.abs(drawn.mean(axis=1) - 32767.5) / (2**16 / np.sqrt(12) / np.sqrt(drawn.shape[1]))
    assert away.max() < 4.5
    assert abs(np.corrcoef(drawn[:, 1:].reshape(-1), drawn[:, :-1].reshape(-1))[0, 1]) < 4.5 / np.sqrt(drawn.size)


def test_places_beyond_32_bits_have_numbers_of_their_own() -> None:
    low = np.arange(SIZE, dtype=np.uint32)
    words = (*words_of(0, 0).values(), 1, 0)
    with np.errstate(over="ignore"):
        drawn = [chance_at(np, low, np.array(high, np.uint32), words) for high in (0, 1, 2)]
    assert np.array_equal(drawn[0], numbers())
    for one, other in itertools.combinations(drawn, 2):
        assert abs(np.corrcoef(one, other)[0, 1]) < 4.5 / np.sqrt(SIZE)


def test_a_matrix_that_lies_turned_in_memory_has_the_numbers_of_its_memory() -> None:
    words = (*words_of(3, 1).values(), 2, 0)
    turned = chance(np, np.zeros((2, 5, 3)), *words, turned=True)
    assert np.array_equal(np.swapaxes(turned, 1, 2), chance(np, np.zeros((2, 3, 5)), *words))
