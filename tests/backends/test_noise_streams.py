"""The words of noise, and what is made of them, alike in every language: where words end, carry and wrap.

In Triton they are looked at in the process of test_noise_triton.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from rulec.array_api.random import Words
from rulec.backend import registry
from rulec.backend.capabilities import Noise
from rulec.es.streams import ELEMENTS, ROWS, SHARED, Stream
from rulec.testing.kinds import CupyKind, NumpyKind
from tests.backends import cuda_stand_in

#: Numbers at the edges of words, seeds and layers; blocks where their numbers begin and need more than 32 bits.
EDGES = (0, 2**31, 2**32 - 1)
STREAMS = [
    *(Stream(2**40 - 1, 7, step, pair) for step, pair in itertools.product(EDGES, EDGES)),
    *(Stream(seed, layer, 5, 3) for seed, layer in itertools.product((0, -1), (0, 2**31 - 1))),
    Stream(2**40 + 3, 2, 2**32 + 1, SHARED, ROWS),
]
BLOCKS = (0, 2**32 - 1)

#: Takes a stream, a count and a first element, and gives words.
Maker = Callable[[Stream, int, int], Any]


def of_jax() -> Maker:
    """Words in JAX, compiled once for each place where they begin."""
    import jax

    from rulec.jax.es.draws import JaxStream

    def words(seed: Any, layer: Any, purpose: int, pair: Any, step: Any, count: int, offset: int) -> Any:
        return JaxStream(seed, layer, step, pair, purpose).words(count, offset)

    compiled = jax.jit(words, static_argnums=(2, 5, 6))

    def made(stream: Stream, count: int, offset: int) -> Any:
        seed, layer, pair, step = (
            np.uint32(x & 0xFFFFFFFF) for x in (stream.seed, stream.layer, stream.pair, stream.step)
        )
        return compiled(seed, layer, stream.purpose, pair, step, count, offset)

    return made


def from_signs(backend: Any, kind: Any) -> Maker:
    """Words put together again from their bits, as they are seen in rademacher noise of one direction."""

    def words(stream: Stream, count: int, offset: int) -> Words:
        noise = noise_of(stream, "rademacher")
        out = kind.make(np.zeros(32 * count, np.float32))
        backend.fill_noise(out, noise, 32 * offset)
        bits = (kind.read(out) < 0).reshape(-1, 32)
        return np.packbits(bits, axis=1, bitorder="little").view("<u4")[:, 0]

    return words


def noise_of(stream: Stream, values: Any, weight: float = 1.0) -> Noise:
    """The noise of one direction."""
    weights = np.full(1, weight, np.float32)
    return Noise(values, stream.seed, stream.layer, stream.step, weights, stream.pair, stream.purpose)


def check_words(make: Maker, streams: list[Stream] = STREAMS) -> int:
    """Asserts that words are those of NumPy in every stream; gives how many streams there are."""
    for stream, block in itertools.product(streams, BLOCKS):
        found = np.asarray(make(stream, 8, 4 * block))
        assert found.dtype == np.uint32
        np.testing.assert_array_equal(found, stream.words(8, 4 * block), f"{stream} from block {block}")
    return len(streams)


def check_whole(backend: Any, kind: Any, streams: list[Stream] = STREAMS) -> int:
    """Asserts that sums of whole numbers are NumPy's bits in every stream."""
    for stream, values in itertools.product(streams, ("rademacher", "popcount")):
        first = ELEMENTS[values] * (2**32 - 1)
        out = kind.make(np.zeros(2 * ELEMENTS[values], np.float32))
        backend.fill_noise(out, noise_of(stream, values, 0.75), first)
        expected = 0.75 * stream.whole(values, 2 * ELEMENTS[values], first)
        np.testing.assert_array_equal(kind.read(out), expected, f"{values} of {stream}")
    return len(streams)


def test_words_in_jax() -> None:
    pytest.importorskip("jax")
    assert check_words(of_jax(), STREAMS[:-1])


@pytest.mark.parametrize("name", ["cpu", "c"])
def test_words_and_whole_numbers_on_the_processor(name: str) -> None:
    backend: Any = registry.get(name)
    if backend.unavailable_reason():
        pytest.skip(backend.unavailable_reason())
    assert check_words(from_signs(backend, NumpyKind()))
    assert check_whole(backend, NumpyKind())


@pytest.fixture
def cuda() -> Iterator[Any]:
    """CuPy's stand-in."""
    with cuda_stand_in.installed() as module:
        yield module
        cuda_stand_in.flush()


@pytest.mark.skipif(bool(cuda_stand_in.MISSING), reason=cuda_stand_in.MISSING or "g++ is here")
def test_words_and_whole_numbers_in_cuda(cuda: Any) -> None:
    from rulec_backends.cupy import CupyBackend

    backend = CupyBackend(threads=32)
    assert check_words(from_signs(backend, CupyKind()))
    assert check_whole(backend, CupyKind(), STREAMS[::4])


def test_jax_takes_positions_that_are_traced_and_mapped() -> None:
    jax = pytest.importorskip("jax")
    from rulec.jax.es.draws import JaxStream

    pairs = np.array(EDGES, np.uint32)

    def of_pair(pair: Any, step: Any, layer: Any, seed: Any) -> tuple[Any, ...]:
        stream = JaxStream(seed, layer, step, pair)
        kinds = [stream.whole(kind, 155, 77) for kind in ("rademacher", "popcount")]
        return stream.of(pair, ROWS).words(9), *kinds, stream.values("normal", 155, 77)

    mapped = jax.jit(jax.vmap(of_pair, (0, None, None, None)))
    found = [np.asarray(x) for x in mapped(pairs, np.uint32(2**32 - 1), np.int32(3), np.int32(-1))]
    streams = [Stream(-1, 3, 2**32 - 1, pair) for pair in EDGES]
    np.testing.assert_array_equal(found[0], [s.of(s.pair, ROWS).words(9) for s in streams])
    for kind, whole_numbers in zip(("rademacher", "popcount"), found[1:3], strict=True):
        np.testing.assert_array_equal(whole_numbers, [s.whole(kind, 155, 77) for s in streams])
    np.testing.assert_allclose(found[3], [s.values("normal", 155, 77) for s in streams], rtol=1e-6)


@pytest.mark.slow
def test_jax_values_are_of_the_dtype_and_scale_asked_for() -> None:
    pytest.importorskip("jax")
    from rulec.jax.es.draws import JaxStream

    position = {"seed": -(2**40) - 1, "layer": 0, "step": 2**32 + 2, "pair": 3}
    found = JaxStream(**position, dtype="bfloat16").values("popcount", 40)
    assert str(found.dtype) == "bfloat16"
    expected = Stream(**position).values("popcount", 40)
    np.testing.assert_allclose(np.asarray(found, np.float32), expected, rtol=2**-8)
