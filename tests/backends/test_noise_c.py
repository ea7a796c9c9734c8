"""Noise in C: sums beside the definition, updates beside those by gradients that were filled before."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import rulec
from rulec.backend import registry
from rulec.backend.capabilities import Noise, Values
from rulec.compiler.layout import layout_for
from rulec.errors import BackendUnsupported
from rulec.es.streams import Stream
from rulec.testing.kinds import NumpyKind, TorchKind
from rulec_backends.c import CBackend
from rulec_backends.c.compile import missing
from rulec_backends.common.noise import ELEMENTS
from tests.backends.noises import VALUES, fused_as_filled, noise_of, summed, worst_fills

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "there is a C compiler")


slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("dtype", "most"),
    [("float32", 1e-6), pytest.param("float64", 2e-15, marks=slow), pytest.param("float16", 1e-3, marks=slow)],
)
def test_sums_are_those_of_the_definition(dtype: str, most: float) -> None:
    assert worst_fills(CBackend(), NumpyKind(), dtype, (1, 5)) < most


def test_tensors_longer_than_a_tile_and_a_chunk() -> None:
    out = np.empty(70001, np.float32)
    CBackend().fill_noise(out, noise_of("popcount", 3), 16)
    np.testing.assert_array_equal(out, summed(noise_of("popcount", 3), 70001, 16, "float32"))


@pytest.mark.slow
def test_tensors_of_torch_in_16_bits() -> None:
    assert worst_fills(CBackend(), TorchKind(), "bfloat16", (2,)) < 1e-2


def test_an_update_by_noise_has_the_bits_of_one_by_a_filled_gradient() -> None:
    assert fused_as_filled(CBackend(), NumpyKind(), "adamw", "float32", "popcount")


@pytest.mark.slow
@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize(("rule", "dtype"), [("lion", "float16"), ("sgd", "float64")])
def test_updates_by_other_rules_and_in_other_dtypes(rule: str, dtype: str, values: Values) -> None:
    assert fused_as_filled(CBackend(), NumpyKind(), rule, dtype, values)


@pytest.mark.slow
def test_gradients_of_another_dtype_ascent_and_some_of_the_tensors() -> None:
    backend, kind = CBackend(), NumpyKind()
    assert fused_as_filled(backend, kind, "adamw", "float64", "popcount", grad="float32", maximize=True)
    assert fused_as_filled(backend, kind, "adamw", "float32", "rademacher", grad="float16", tensors=[1, 3])


def test_no_directions_are_a_gradient_of_zero() -> None:
    out = np.ones(200, np.float32)
    CBackend().fill_noise(out, Noise("popcount", 0, 0, 0, np.zeros(3, np.float32)))
    assert (out == 0).all()


def ulps(stream: Stream, count: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """The errors of normal numbers of float32, in units in the last place of the exact ones."""
    noise = Noise("normal", stream.seed, stream.layer, stream.step, np.ones(1, np.float32), stream.pair)
    out = np.empty(count, np.float32)
    CBackend().fill_noise(out, noise)
    exact = stream.values("normal", count)
    return np.abs(out - exact) / np.spacing(np.abs(exact).astype(np.float32))


def test_normal_numbers_are_good_to_four_ulp() -> None:
    assert ulps(Stream(1, 0, 0, 0), 1 << 20).max() < 4.0


@pytest.mark.slow
def test_normal_numbers_of_many_words_are_good_to_four_ulp() -> None:
    assert max(ulps(Stream(seed, 0, 0, 0), 1 << 23).max() for seed in range(2)) < 4.0


def test_the_code_reads_like_the_rule() -> None:
    program = rulec.compile(rulec.load("lion"))
    source = CBackend().emit_estimate(program, layout_for(program, "bfloat16", maximize=True), "popcount")
    lines = [line.strip() for line in source.splitlines()]
    for line in (
        "const float g = -from_bfloat16(g_at[i]);",
        "planes[1][w] += weight * less_four(bits >> 8 & 255);",
        "tile[e] = to_bfloat16(sums[e]);",
        "const Noise *noise = bucket->g[at->tensor];",
    ):
        assert line in lines, line


@pytest.mark.parametrize("backend", ["cpu", "c", "cupy", "triton"])
def test_what_has_no_estimate_is_refused_in_one_sentence(backend: str) -> None:
    lamb = rulec.compile(rulec.load("lamb"))
    made: Any = registry.get(backend)
    with pytest.raises(BackendUnsupported, match="cannot express the reductions or matrix functions of rule 'LAMB'"):
        made.emit_estimate(lamb, layout_for(lamb, "float32"), "normal")
    adamw = rulec.compile(rulec.load("adamw"))
    with pytest.raises(BackendUnsupported, match="noise of 'uniform' of rule 'AdamW'"):
        made.emit_estimate(adamw, layout_for(adamw, "float32"), "uniform")
    still = rulec.compile(rulec.parse("name: Still\nstep: p = 0.5*p\n"))
    with pytest.raises(BackendUnsupported, match="a gradient that is not read of rule 'Still'"):
        made.emit_estimate(still, layout_for(still, "float32"), "normal")
    fed = rulec.compile(rulec.parse("name: Fed\ninputs: {c: like p}\nstep: direction = g*c\n"))
    with pytest.raises(BackendUnsupported, match="the input 'c' beside noise of rule 'Fed'"):
        made.emit_estimate(fed, layout_for(fed, "float32"), "normal")


def test_blocks_serve_as_many_elements_as_the_definition_says() -> None:
    from rulec.es import streams

    assert {kind: streams.ELEMENTS[kind] for kind in ELEMENTS} == ELEMENTS
