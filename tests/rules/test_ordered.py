"""Rules that order values, where 25 steps of small matrices do not reach."""

from __future__ import annotations

import numpy as np
import pytest

import rulec
from rulec.array import Optimizer
from rulec.compiler.text import program_text
from tests.rules.printed_ordered import PercentileClip


@pytest.mark.parametrize("percentile", [0, 5, 60, 99])
def test_a_ring_of_a_hundred_norms_is_overwritten(percentile: int) -> None:
    draws = np.random.default_rng(percentile)
    weights = [np.zeros(3)]
    ours = Optimizer(rulec.load("transforms/percentile_clip >> sgd"), weights, "numpy", lr=0.1, percentile=percentile)
    theirs = PercentileClip([np.zeros(3)])
    for _ in range(230):
        g = draws.normal(size=3) * draws.exponential()
        ours.step([g])
        theirs.step([g], {"lr": 0.1, "percentile": percentile})
    np.testing.assert_allclose(weights[0], theirs.w[0], rtol=1e-12)


@pytest.mark.parametrize(
    ("rows", "cols", "number"),
    [(2048, 2048, 3.4916), (3072, 2048, 3.4509), (2048, 8192, 2.9794), (16384, 2048, 3.1943)],
)
def test_root_has_coefficients_for_the_matrices_of_its_model(rows: int, cols: int, number: float) -> None:
    facts = {"ndim": 2, "rows": rows, "cols": cols, "numel": rows * cols}
    assert f"coefficients=[[{number:g}," in program_text(rulec.compile(rulec.load("root"), facts=facts))
