"""The words of noise, and what is made of them, alike in every language: where words end, carry and wrap."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rulec.es.streams import ROWS, SHARED, Stream, Words

#: Numbers at the edges of words, and elements at those of words, of blocks, and of blocks' numbers.
EDGES = (0, 2**31, 2**32 - 1)
ELEMENTS = (0, 125, 2**34 - 5, 2**34 * 3 + 1)
STREAMS = [
    *(Stream(seed, layer, step, pair) for seed, layer, step, pair in itertools.product((-1, 5), (0, 7), EDGES, EDGES)),
    Stream(2**40 + 3, 2, 2**32 + 1, SHARED, ROWS),
]


def jax_words(stream: Stream, count: int, offset: int) -> Any:
    from rulec.jax.es.philox import words

    return words(stream.seed, stream.layer, stream.purpose, stream.pair, stream.step, count, offset)


WORDS: dict[str, Callable[[Stream, int, int], Any]] = {"jax": jax_words}


@pytest.mark.parametrize("backend", sorted(WORDS))
def test_words_are_the_same_bits(backend: str) -> None:
    for stream, offset in itertools.product(STREAMS[:: 1 if backend != "jax" else 5], ELEMENTS):
        found: Words = np.asarray(WORDS[backend](stream, 11, offset))
        assert found.dtype == np.uint32
        np.testing.assert_array_equal(found, stream.words(11, offset), f"{stream} from {offset}")


def test_jax_takes_positions_that_are_traced_and_mapped() -> None:
    jax = pytest.importorskip("jax")
    from rulec.jax.es.philox import values, whole, words

    pairs = np.array(EDGES, np.uint32)

    def of_pair(pair: Any, step: Any, layer: Any, seed: Any) -> tuple[Any, ...]:
        position = {"seed": seed, "layer": layer, "step": step, "pair": pair}
        kinds = [whole(kind, (5, 31), offset=77, **position) for kind in ("rademacher", "popcount")]
        return words(seed, layer, ROWS, pair, step, 9), *kinds, values("normal", (5, 31), offset=77, **position)

    mapped = jax.jit(jax.vmap(of_pair, (0, None, None, None)))
    found = [np.asarray(x) for x in mapped(pairs, np.uint32(2**32 - 1), np.int32(3), np.int32(-1))]
    streams = [Stream(-1, 3, 2**32 - 1, pair) for pair in EDGES]
    np.testing.assert_array_equal(found[0], [s.of(s.pair, ROWS).words(9) for s in streams])
    for kind, whole_numbers in zip(("rademacher", "popcount"), found[1:3], strict=True):
        np.testing.assert_array_equal(whole_numbers, [s.whole(kind, 155, 77).reshape(5, 31) for s in streams])
    np.testing.assert_allclose(found[3], [s.values("normal", 155, 77).reshape(5, 31) for s in streams], rtol=1e-6)


def test_jax_values_are_of_the_dtype_and_scale_asked_for() -> None:
    pytest.importorskip("jax")
    from rulec.jax.es.philox import values

    position = {"seed": 1, "layer": 0, "step": 2, "pair": 3}
    found = values("popcount", (40,), dtype="bfloat16", **position)
    assert str(found.dtype) == "bfloat16"
    expected = Stream(1, 0, 2, 3).values("popcount", 40)
    np.testing.assert_allclose(np.asarray(found, np.float32), expected, rtol=2**-8)
