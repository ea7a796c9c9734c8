"""Strategies of CuPy's arrays are those of NumPy's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rulec.array import Optimizer
from rulec.array.es import Perturbation, Strategy

pytestmark = pytest.mark.gpu

FAMILIES = {
    "independent": {}, "sparse": {"sparsity": 3}, "permuted": {"sides": "both"}, "signflip": {}, "lowrank": {"rank": 2},
    "dropout": {},
}  # fmt: skip


@pytest.fixture
def cupy() -> Any:
    return pytest.importorskip("cupy")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_on_a_gpu_is_that_on_a_cpu(cupy: Any, family: str) -> None:
    random = np.random.default_rng(2)
    here = {"kernel": random.standard_normal((8, 5)).astype(np.float32), "bias": np.ones(5, np.float32)}
    there = {name: cupy.asarray(array) for name, array in here.items()}
    perturbation = Perturbation(family, 4, 0.1, values="popcount", seed=0, **FAMILIES[family])  # type: ignore[arg-type]
    x = random.standard_normal((16, 8)).astype(np.float32)
    fitness, products = np.linspace(-1, 2, 8), []
    for params, rows in ((here, x), (there, cupy.asarray(x))):
        es, opt = Strategy(params, perturbation), Optimizer("sgd", params, lr=0.1)
        products.append(es.product(rows, "kernel"))
        es.step(fitness, opt)
    assert np.abs(cupy.asnumpy(products[1]) - products[0]).max() < 1e-5
    for name in here:
        assert np.abs(cupy.asnumpy(there[name]) - here[name]).max() < 1e-5
