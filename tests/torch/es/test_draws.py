"""Noise by torch's operations, as on a device that has no kernel for it, is that of the kernels."""

from __future__ import annotations

import pytest
import torch

from rulec.es.perturbation import Values
from rulec.torch.es.noise.draws import Draws


@pytest.mark.parametrize("kind", ["normal", "rademacher", "popcount"])
def test_noise_by_torch_is_that_of_the_kernels(kind: Values) -> None:
    draws = Draws(7, 3, 2, kind, torch.device("cpu"), torch.float64)
    for offset in (0, 129):
        expected = draws.elements([0, 5], 1, 300, offset)
        found = draws.by_torch([0, 5], 1, 300, offset)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6 if kind == "normal" else 1e-15)
