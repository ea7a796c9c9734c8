"""The cupy backend on a GPU: the contract, and whole optimizers, with CuPy itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import rulec
from rulec.array import Optimizer
from rulec.testing import CupyKind, TorchKind, check_backend

pytestmark = pytest.mark.gpu

cupy = pytest.importorskip("cupy")


@pytest.mark.parametrize("kind", [CupyKind(), TorchKind("cuda")], ids=["cupy", "torch"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
def test_it_is_a_backend_on_a_gpu(kind: Any, dtype: str) -> None:
    report = check_backend("cupy", arrays=kind, dtypes=[dtype])
    assert (report.rules, report.refused, report.unmet) == (rulec.rules(), [], [])


@pytest.mark.parametrize("name", ["adamw", "adafactor", "lamb", "muon", "shampoo", "soap", "galore"])
def test_an_optimizer_of_cupy_arrays_is_that_of_numpy_s(name: str) -> None:
    random = np.random.default_rng(4)
    start = [random.standard_normal(shape) for shape in ((33, 33), (7,), (64, 64))]
    ours, theirs = [cupy.asarray(p) for p in start], [p.copy() for p in start]
    gpu, cpu = Optimizer(name, ours), Optimizer(name, theirs, backend="numpy")
    for _ in range(3):
        grads = [random.standard_normal(p.shape) for p in start]
        gpu.step([cupy.asarray(g) for g in grads])
        cpu.step(grads)
    for got, wanted in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(got.get(), wanted, rtol=1e-8, atol=1e-10)


def test_a_tensor_past_32_bits() -> None:
    count = 2**31 + 17
    if cupy.cuda.Device().mem_info[0] < 4 * 2 * count + 2**30:
        pytest.skip("the GPU has too little memory")
    param = cupy.full(count, 1.0, np.float32)
    Optimizer("sgd", param, lr=0.5).step(cupy.full(count, 0.5, np.float32))
    assert float(param.min()) == float(param.max()) == 0.75
