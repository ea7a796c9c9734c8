"""CuPy's arrays, and torch's tensors on the cupy backend."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import rulec
import rulec.torch
from rulec.array import Optimizer
from rulec.errors import RulecError
from rulec.testing.whole import tolerance
from tests.gpu.training import assert_near, give, gradients, parameters

pytestmark = pytest.mark.gpu

SHAPES = ((64, 48), (7,), (3, 5, 4))


@pytest.fixture
def cupy() -> Any:
    return pytest.importorskip("cupy")


@pytest.mark.parametrize("name", ["sgd", "adamw", "lamb", "adafactor", "muon", "prodigy"])
def test_arrays_of_cupy_step_as_those_of_numpy(cupy: Any, name: str) -> None:
    random = np.random.default_rng(3)
    here = [random.standard_normal(shape) for shape in SHAPES]
    there = [cupy.asarray(p) for p in here]
    ours, plain = Optimizer(name, there), Optimizer(name, here, backend="numpy")
    for _ in range(3):
        grads = [random.standard_normal(shape) for shape in SHAPES]
        ours.step([cupy.asarray(g) for g in grads])
        plain.step(grads)
    allowed = tolerance(rulec.load(name))
    for a, b in zip(there, here, strict=True):
        assert np.max(np.abs(cupy.asnumpy(a) - b)) <= allowed * np.max(np.abs(b))


@pytest.mark.parametrize("name", ["adamw", "lamb"])
def test_tensors_of_torch_on_the_cupy_backend_step_as_on_triton(cupy: Any, name: str) -> None:
    ours, theirs = parameters(), parameters()
    kind = rulec.torch.optimizer(name)
    mine, other = kind(ours, backend="cupy"), kind(theirs, backend="triton")
    for step in range(4):
        for params, optimizer in ((ours, mine), (theirs, other)):
            give(params, gradients(params, step))
            optimizer.step()
    assert_near(ours, theirs, 4 * 2.0**-22)


def test_an_array_of_numpy_among_those_of_cupy_is_refused(cupy: Any) -> None:
    with pytest.raises(RulecError):
        Optimizer("sgd", [cupy.zeros(3), np.zeros(3)])
