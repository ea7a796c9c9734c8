"""Noise on the device: sums beside the definition, updates beside those by gradients that were filled before."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from rulec.backend import registry
from rulec.backend.capabilities import Values
from rulec.testing.kinds import TorchKind
from tests.backends.noises import VALUES, fused_as_filled, noise_of, summed, worst_fills
from tests.backends.test_noise_streams import STREAMS, check_whole, check_words, from_signs
from tests.gpu.training import DEVICE

pytestmark = pytest.mark.gpu

KIND = TorchKind(DEVICE)


@pytest.fixture(params=["triton", "cupy"])
def backend(request: pytest.FixtureRequest) -> Any:
    """A backend that is usable here."""
    found = registry.get(request.param)
    reason = found.unavailable_reason()
    if reason:
        pytest.skip(reason)
    return found


@pytest.mark.parametrize(("dtype", "most"), [("float32", 1e-6), ("float64", 4e-15), ("bfloat16", 1e-2)])
def test_sums_are_those_of_the_definition(backend: Any, dtype: str, most: float) -> None:
    """A normal of up to 8 is off by a few units in its last place; in float64 these are 9e-16 each."""
    assert worst_fills(backend, KIND, dtype, (1, 35), 3000) < most


def test_words_and_whole_numbers_are_those_of_the_definition(backend: Any) -> None:
    assert check_words(from_signs(backend, KIND))
    assert check_whole(backend, KIND, STREAMS)


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize(("rule", "dtype"), [("adamw", "float32"), ("lion", "bfloat16"), ("sgd", "float64")])
def test_an_update_by_noise_has_the_bits_of_one_by_a_filled_gradient(
    backend: Any, rule: str, dtype: str, values: Values
) -> None:
    shapes = ((1,), (1000, 1025), (7,), (2100,))
    assert fused_as_filled(backend, KIND, rule, dtype, values, shapes=shapes, directions=40)
    assert fused_as_filled(backend, KIND, rule, dtype, values, shapes=shapes, maximize=True, skip=1)


def test_tensors_that_stay_scales_and_some_of_the_tensors(backend: Any) -> None:
    def stays() -> Any:
        return torch.tensor([False, True], device=DEVICE)

    def scale() -> Any:
        return torch.tensor([3.0], device=DEVICE)

    assert fused_as_filled(backend, KIND, "adamw", "float32", "popcount", tensors=[1, 3])
    assert fused_as_filled(backend, KIND, "adamw", "float32", "popcount", stays=stays)
    assert fused_as_filled(backend, KIND, "adamw", "float32", "popcount", scale=scale)


def test_millions_of_elements_and_another_stream(backend: Any) -> None:
    noise = noise_of("popcount", 3)
    out = torch.empty(5_000_001, device=DEVICE)
    with torch.cuda.stream(torch.cuda.Stream()):
        backend.fill_noise(out, noise)
    torch.cuda.synchronize()
    np.testing.assert_array_equal(out.cpu().numpy(), summed(noise, 5_000_001, 0, "float32"))


def test_both_backends_make_the_same_normal_numbers() -> None:
    found = []
    for name in ("triton", "cupy"):
        made: Any = registry.get(name)
        if made.unavailable_reason():
            pytest.skip(made.unavailable_reason())
        out = torch.empty(100_000, device=DEVICE)
        made.fill_noise(out, noise_of("normal", 1))
        found.append(out)
    assert torch.equal(*found)
