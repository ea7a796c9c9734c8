"""States in codes where there is a GPU: the kernels' bits are those of the definition."""

from __future__ import annotations

from typing import Any

import pytest

from rulec.backend import registry
from rulec.formats import NAMES
from tests.backends.coded_training import Memory, check, signed, training, unsigned

pytestmark = pytest.mark.gpu

torch: Any = pytest.importorskip("torch")
GPU = Memory(lambda array: torch.from_numpy(array).cuda(), lambda tensor: tensor.cpu().numpy())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("backend", ["triton", "cupy"])
def test_both_states_of_adamw_in_one_format(backend: str, name: str) -> None:
    for count in (5003, 300_000):
        check(training("adamw", {"m": signed(name), "v": unsigned(name)}, (count,), GPU), registry.get(backend))


@pytest.mark.parametrize("backend", ["triton", "cupy"])
def test_long_blocks(backend: str) -> None:
    formats = {"m": signed("int8/4096"), "v": unsigned("dynamic8/2048")}
    check(training("adamw", formats, (70_001,), GPU), registry.get(backend))
