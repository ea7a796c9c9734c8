"""The reference of the streams: known words, what elements become, and that no two streams are the same."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from rulec.array_api.random import normal, philox
from rulec.es import streams
from rulec.es.streams import Stream, short_weights


def test_words_are_those_of_the_authors() -> None:
    # The known answers of Random123's philox4x32 with 10 rounds.
    zeros = [int(w) for w in philox((0, 0, 0, 0), (0, 0))]
    ones = [int(w) for w in philox((2**32 - 1,) * 4, (2**32 - 1,) * 2)]
    assert zeros == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert ones == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


def test_each_number_has_a_word_of_its_own() -> None:
    stream = Stream(seed=5, layer=7, step=11, pair=13, purpose=3)
    (found,) = stream.blocks(2**35 + 9, 1)
    counter = (9, 2**3 + (3 << 16), 13, 11)
    assert [int(w) for w in found] == [int(w) for w in philox(counter, (5, 7 + 2**31))]


def test_normal_noise_is_the_language_own() -> None:
    found = Stream(seed=3, layer=2, step=5, pair=4).values("normal", 101)
    assert np.array_equal(found, normal(101, seed=3, tensor=2 + 2**31, draw=4, step=5))


@pytest.mark.parametrize("kind", ["normal", "rademacher", "popcount"])
def test_elements_do_not_depend_on_where_one_begins(kind: str) -> None:
    stream = Stream(seed=1, layer=0, step=2, pair=3)
    whole = stream.values(kind, 700)
    for offset, count in [(0, 1), (1, 5), (127, 2), (128, 300), (333, 129)]:
        assert np.array_equal(stream.values(kind, count, offset), whole[offset : offset + count])


def test_bits_and_bytes_are_taken_lowest_first() -> None:
    stream = Stream(seed=9, layer=1, step=0, pair=0)
    words = [int(w) for w in stream.blocks(0, 1)[0]]
    signs = stream.whole("rademacher", 128)
    assert [int(s) for s in signs] == [1 - 2 * (words[e // 32] >> (e % 32) & 1) for e in range(128)]
    counts = stream.whole("popcount", 16)
    assert [int(k) for k in counts] == [(words[e // 4] >> (8 * (e % 4)) & 255).bit_count() - 4 for e in range(16)]


@pytest.mark.parametrize("kind", ["normal", "rademacher", "popcount"])
def test_noise_has_mean_0_and_variance_1(kind: str) -> None:
    count = 2**20
    found = Stream(seed=0, layer=0, step=0, pair=0).values(kind, count)
    assert abs(found.mean()) < 7 / count**0.5
    # The variance of a square is at most 2, that of a normal number.
    assert abs((found**2).mean() - 1) < 7 * (2 / count) ** 0.5


def test_no_two_streams_share_a_block() -> None:
    numbers = [0, 1, 2**31, 2**32 - 1]
    seen = set()
    for seed, step, pair in itertools.product(numbers, repeat=3):
        for layer, purpose in itertools.product([0, 1, 2**31 - 1], range(5)):
            for block in (0, 1, 2**32, 2**47):
                seen.add(tuple(map(int, Stream(seed, layer, step, pair, purpose).blocks(block, 1)[0])))
    assert len(seen) == 4**3 * 3 * 5 * 4


def test_a_permutation_has_every_line_once() -> None:
    stream = Stream(seed=2, layer=3, step=4, pair=5, purpose=streams.ROWS)
    assert sorted(stream.permutation(1000)) == list(range(1000))
    assert not np.array_equal(stream.permutation(1000), stream.of(6).permutation(1000))


def test_products_of_short_weights_are_exact() -> None:
    rng = np.random.default_rng(0)
    weights = short_weights(rng.normal(size=1000) * 10.0 ** rng.integers(-20, 20, 1000), "popcount")
    for k in range(-4, 5):
        assert np.array_equal((weights * np.float32(k)).astype(np.float64), weights.astype(np.float64) * k)
    kept = short_weights(np.array([0.3, 0.0]), "rademacher")
    assert kept[0] == pytest.approx(0.3, rel=2.0**-20)
    assert kept[1] == 0.0
    assert short_weights(np.array([0.3]), "normal")[0] == np.float32(0.3)
