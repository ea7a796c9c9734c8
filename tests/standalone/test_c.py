"""The C that `rulec build` writes, against the reference and the cpu backend."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rulec
from rulec.compiler.reference import ReferenceOptimizer
from rulec.standalone.refusal import CannotBuild
from tests.standalone.c_library import CRule, CRun, drawn

SHAPES = ((5,), (7, 3), (2, 3, 4, 5), (), (1,), (0,), (0, 4), (3, 4100), (70, 2), (8192 * 2 + 3,))

COMPOSED = (
    "clip_by_norm >> adamw", "lookahead(adam, k=2)", "accumulate(momentum, every=3)", "lion >> cautious",
    "adam >> trust_ratio", "adaptive_clip >> sgd", "centralize >> adam", "ema(sgd)", "schedule_free(adam)",
    "lookahead(adafactor, k=2)", "clip_by_norm >> came",
)  # fmt: skip


def built() -> list[str]:
    """Every rule of the library that runs by itself, and some composed of them, that can be written as C."""
    from rulec.standalone.cases import family

    names = []
    for name in [*rulec.rules(wrappers=False), *COMPOSED]:
        try:
            family(rulec.load(name), "float32", "", "C")
        except CannotBuild:
            continue
        names.append(name)
    return names


def alone(rule: rulec.Rule, params: Sequence[Any]) -> ReferenceOptimizer:
    """The reference for tensors each of which is a group by itself, as they are in C."""
    return ReferenceOptimizer(rule, params, [{}] * len(params), groups=range(len(params)))


@pytest.mark.parametrize("name", built())
def test_steps_are_the_references(name: str, tmp_path: Path) -> None:
    rule = rulec.load(name)
    params, steps = drawn(0, SHAPES, 7)
    reference = alone(rule, params)
    run = CRun(CRule(rule, tmp_path, "float64"), params)
    for number, grads in enumerate(steps):
        given: list[Any] = [g if number != 3 or i % 2 else None for i, g in enumerate(grads)]
        reference.step(given)
        run.step(given)
        for ours, theirs in zip(run.arrays, reference.params, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-11, atol=1e-13)
