"""Noise on the CPU: its words and values beside their definitions, and kernels that use it as a gradient."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rulec.backend.capabilities import Noise
from rulec.compiler.layout import Layout, layout_for
from rulec.errors import BackendUnsupported, TensorError
from rulec.es.streams import Stream, short_weights
from rulec_backends.common.threads import POLICY
from rulec_backends.cpu import CpuBackend
from rulec_backends.cpu.noise import fill_lines, fill_noise, fill_words
from rulec_backends.cpu.noise_words import TILE
from tests.backends.cpu_programs import Bucket, bucket_of, program_of

VALUES = ("normal", "rademacher", "popcount")

#: Directions' weights as a strategy gives them: one of them counts for nothing.
WEIGHTS = np.array([0.3, 0.0, -1.7, 2.5e-3])

#: Random123's known answers (kat_vectors) of Philox4x32-10: counter and key of all zeros, and of all ones.
KNOWN = {
    0: (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
    0xFFFFFFFF: (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
}

#: Beyond 2**32 blocks, and within a block, a batch and a tile.
FAR = 2**40 + 4 * TILE + 77

CHUNK = POLICY.chunk
SIZES = (1, 0, 7, TILE, TILE + 1, CHUNK + 333, 2 * CHUNK)


def noise_of(values: Any, layer: int = 3, **changes: Any) -> Noise:
    return replace(Noise(values, 7, layer, 5, short_weights(WEIGHTS, values)), **changes)


def defined(given: Noise, count: int, offset: int = 0) -> np.ndarray[Any, Any]:
    """The sum in float64, from the definition of the streams."""
    total = np.zeros(count)
    for direction, weight in enumerate(given.weights, given.first):
        stream = Stream(given.seed, given.layer, given.step, direction, given.purpose)
        whole = stream.values if given.values == "normal" else stream.whole
        total += float(weight) * whole(given.values, count, offset)
    return total


def filled(given: Noise, count: int, dtype: str = "float32", offset: int = 0) -> np.ndarray[Any, Any]:
    found = np.full(count, np.nan, dtype)
    fill_noise(found, given, offset)
    return found


# Words


@pytest.mark.parametrize("ones", KNOWN)
def test_words_are_those_of_random123(ones: int) -> None:
    found = np.zeros(8, np.uint32)
    # A layer and an offset that make all words of key and counter alike: no strategy has them.
    offset = 4 * ((0xFFFF << 32) + ones) if ones else 0
    fill_words(found, seed=ones, layer=ones - 2**31, step=ones, pairs=[ones], purpose=ones >> 16, offset=offset)
    assert tuple(found[:4].tolist()) == KNOWN[ones]


def test_words_go_on_from_any_offset() -> None:
    stream = Stream(7, 3, 5, 2**32 - 1, 4)
    for offset in (0, 5, FAR):
        found = np.zeros(70_001, np.uint32)
        fill_words(found, seed=7, layer=3, step=5, pairs=[2**32 - 1], purpose=4, offset=offset)
        assert np.array_equal(found, stream.words(found.size, offset))


# Values


@pytest.mark.parametrize("values", ["rademacher", "popcount"])
def test_sums_of_whole_numbers_are_exact(values: str) -> None:
    given = noise_of(values, weights=np.array([0.25, 0.0, -1.5, 2.0], np.float32), first=2**31, purpose=1)
    for size, offset in ((0, 0), (1, 0), (1000, 3), (2 * CHUNK + 5, 0), (70_000, FAR)):
        assert np.array_equal(filled(given, size, offset=offset), defined(given, size, offset))


@pytest.mark.parametrize("values", [pytest.param("rademacher", marks=pytest.mark.slow), "popcount"])
def test_sums_are_rounded_direction_by_direction_and_then_to_the_dtype(values: str) -> None:
    given = noise_of(values)
    total = np.zeros(5000, np.float32)
    for direction, weight in enumerate(given.weights):
        total = total + weight * Stream(7, 3, 5, direction).whole(values, 5000, 9).astype(np.float32)
    assert total.dtype == np.float32
    assert np.array_equal(filled(given, 5000, offset=9), total)
    assert np.array_equal(filled(given, 5000, "float16", 9), total.astype(np.float16))
    brain = torch.full((5000,), torch.nan, dtype=torch.bfloat16)
    fill_noise(brain, given, 9)
    assert torch.equal(brain, torch.from_numpy(total).bfloat16())


def test_normal_numbers_are_near_their_definition() -> None:
    one = noise_of("normal", weights=np.ones(1))
    for size, offset in ((1, 1), (100_000, 0), (70_001, FAR)):
        exact = defined(one, size, offset)
        ulp = np.spacing(np.abs(exact).astype(np.float32)).astype(np.float64)
        assert (np.abs(filled(one, size, offset=offset) - exact) <= 4 * ulp).all()
        # Near zero the definition has an error of its own.
        assert np.allclose(filled(one, size, "float64", offset), exact, rtol=1e-15, atol=6e-15)


@pytest.mark.parametrize("values", VALUES)
def test_moments_are_those_of_the_distribution(values: str) -> None:
    found = filled(noise_of(values, weights=short_weights([1.0], values)), 400_000).astype(np.float64)
    kurtosis = {"normal": 3.0, "rademacher": 1.0, "popcount": 2.75}[values]
    spread = np.sqrt((kurtosis - 1) / found.size)
    assert abs(found.mean()) < 7 / np.sqrt(found.size)
    assert abs(found.var() - 1) < 7 * spread + 1e-5
    assert abs((found**4).mean() - kurtosis) < 7 * np.sqrt(105 / found.size)


def test_directions_without_weight_cost_and_change_nothing() -> None:
    all_four, two = noise_of("normal"), noise_of("normal", weights=short_weights(WEIGHTS[2:], "normal"), first=2)
    first = noise_of("normal", weights=short_weights(WEIGHTS[:1], "normal"))
    assert list(all_four.counted[0]) == [0, 2, 3]
    assert not np.array_equal(filled(all_four, 100), filled(two, 100))
    assert np.array_equal(filled(noise_of("normal", weights=np.zeros(3)), 100), np.zeros(100))
    assert np.allclose(filled(all_four, 100), filled(first, 100) + filled(two, 100), atol=1e-6)


def test_arrays_in_any_dense_order_are_filled_and_others_refused() -> None:
    given = noise_of("popcount")
    turned = np.zeros((40, 30), np.float32).T
    fill_noise(turned, given)
    assert np.array_equal(turned.T.reshape(-1), filled(given, 1200))
    with pytest.raises(TensorError, match="gaps"):
        fill_noise(np.zeros((4, 6), np.float32)[:, ::2], given)
    with pytest.raises(TensorError, match="gaps"):
        fill_noise(torch.zeros(1).expand(4), given)
    frozen = np.zeros(3, np.float32)
    frozen.flags.writeable = False
    for elsewhere in (frozen, torch.zeros(3, device="meta")):
        with pytest.raises(TensorError, match="main memory"):
            fill_noise(elsewhere, given)
    with pytest.raises(TensorError, match="not of int32"):
        fill_noise(np.zeros(3, np.int32), given)
    with pytest.raises(TensorError, match="not of float32"):
        fill_words(np.zeros(3, np.float32), seed=1, layer=1, step=1, pairs=[1])


# Kernels whose gradients are noise


def estimated(bucket: Bucket, given: list[Noise], offset: int = 0, **options: Any) -> list[dict[str, Any]]:
    """Copies of the buffers after an update with noise, which are put back."""
    backend = CpuBackend()
    before = [{k: v.copy() for k, v in bucket.buffers(i).items()} for i in range(len(bucket.params))]
    source = backend.emit_estimate(bucket.program, bucket.layout, given[0].values)
    kernel = backend.build_estimate(bucket.program, bucket.layout, given[0].values, source)
    kernel.bind(bucket.params, bucket.states, offset=offset)(0, given, bucket.rows, **options)
    found = [bucket.results(i) for i in range(len(bucket.params))]
    for i, old in enumerate(before):
        for name, value in bucket.buffers(i).items():
            value[...] = old[name]
    return found


def check(rule: str, values: str, layout: Layout | None = None, dtype: str = "float32", offset: int = 0) -> None:
    """That an update with noise has the bits of one with a gradient that noise was written to."""
    bucket = bucket_of(rule, SIZES, layout, dtype)
    given = [noise_of(values, layer) for layer in range(len(SIZES))]
    found = estimated(bucket, given, offset)
    for gradient, own in zip(bucket.grads, given, strict=True):
        fill_noise(gradient, own, offset)
    before = [p.copy() for p in bucket.params]
    bucket.call()(0, bucket.grads, bucket.rows)
    for i, buffers in enumerate(found):
        for name, value in bucket.results(i).items():
            assert np.array_equal(buffers[name].view(np.uint8), value.view(np.uint8)), (rule, values, i, name)
    assert not any(np.array_equal(old, p) for old, p in zip(before, bucket.params, strict=True) if p.size > 1)


@pytest.mark.parametrize("values", VALUES)
def test_an_update_with_noise_is_one_with_a_gradient_of_it(values: str) -> None:
    check("adamw", values)


def test_far_elements_have_words_of_their_own() -> None:
    check("adamw", "popcount", offset=FAR)


@pytest.mark.slow
def test_gradients_are_rounded_to_their_dtype_and_turned_where_uphill() -> None:
    program = program_of("lion")
    narrow = layout_for(program, "float16", states={"m": "float32"}, maximize=True)
    check("lion", "popcount", narrow, "float16")


def test_bits_do_not_depend_on_threads() -> None:
    bucket = bucket_of("adamw", (40 * CHUNK + 5,))
    given, threads = noise_of("popcount"), torch.get_num_threads()
    found = []
    for count in (1, 2):
        torch.set_num_threads(count)
        found.append((filled(given, 40 * CHUNK + 5), *estimated(bucket, [given])[0].values()))
    torch.set_num_threads(threads)
    assert all(np.array_equal(one, two) for one, two in zip(*found, strict=True))


def test_some_tensors_of_a_bucket_are_updated_alone() -> None:
    bucket = bucket_of("adamw", (500, 3000, 40))
    given = [noise_of("rademacher", layer) for layer in range(3)]
    every, two = estimated(bucket, given), estimated(bucket, [given[2], given[0]], tensors=[2, 0])
    assert all(np.array_equal(two[i][n], every[i][n]) for i in (0, 2) for n in every[i])
    assert np.array_equal(two[1]["p"], bucket.params[1])


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "dtype", "values"), [
    ("sgd", "float64", "normal"), ("lion", "float16", "rademacher"), ("rprop", "float32", "popcount"),
    ("lion", "float64", "popcount"), ("rprop", "float16", "normal"), ("sgd", "float32", "rademacher"),
])  # fmt: skip
def test_updates_with_noise_of_other_rules_and_dtypes(rule: str, dtype: str, values: str) -> None:
    check(rule, values, dtype=dtype)


def test_rules_of_several_stages_are_refused() -> None:
    program = program_of("lamb")
    with pytest.raises(BackendUnsupported):
        CpuBackend().emit_estimate(program, layout_for(program, "float32"), "popcount")


@pytest.mark.parametrize("values", ["normal", "rademacher", "popcount"])
def test_lines_are_of_a_direction_each(values: Any) -> None:
    pairs, one = [5, 0, 2**32 - 1], Noise(values, 3, 4, 5, np.array([0.5]), purpose=2)
    found = np.empty((3, 5001), np.float32)
    fill_lines(found, one, pairs, 129)
    for line, pair in zip(found, pairs, strict=True):
        alone = np.empty(5001, np.float32)
        fill_noise(alone, replace(one, first=pair), 129)
        np.testing.assert_array_equal(line, alone)
    words = np.empty((2, 77), np.uint32)
    fill_words(words, seed=1, layer=2, step=3, pairs=[9, 4], purpose=1)
    np.testing.assert_array_equal(words[1], Stream(1, 2, 3, 4, 1).words(77))
    with pytest.raises(TensorError, match="3 directions"):
        fill_lines(found[:2], one, pairs)
