"""Weights as memory has them, by NumPy alone: of a parameter and of what lies beside it."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from rulec.compiler.weights import DTYPES

#: The kinds of parameters to measure: float32 and bfloat16 without memory beside them, and bfloat16 with each kind.
KINDS = ["float32", "bfloat16", *DTYPES]


def first_weights(size: int = 4000) -> Any:
    """Weights over ten decades, so that a step of one size is lost in some of any dtype, and changes others."""
    random = np.random.default_rng(0)
    return (random.standard_normal(size) * 10.0 ** random.uniform(-4, 6, size)).astype(np.float32)


def gradient(step: int, size: int = 4000) -> Any:
    """A gradient of ordinary size."""
    return np.random.default_rng(step).standard_normal(size).astype(np.float32)


#: Rules of one stage and of two, with rates at which their steps are of the size of `first_weights`.
RATES = {"adamw": 1e-3, "lamb": 1e-8}


def options(kind: str) -> dict[str, Any]:
    """The keywords of an optimizer for a kind of parameters."""
    return {"weights": kind} if kind in DTYPES else {}


def weights(kind: str, param: Any, part: Any) -> Any:
    """The float32 weights of a parameter in float32, and of the memory beside it."""
    p = np.asarray(param, np.float32)
    if kind == "master":
        return np.asarray(part, np.float32).copy()
    if kind == "kahan":
        return p + np.asarray(part, np.float32)
    if kind in ("split", "split24"):
        return (p.view(np.int32) + np.asarray(part, np.int32) * (256 if kind == "split24" else 1)).view(np.float32)
    return p.copy()


def check_unchanged(measured: list[Any], seen: list[Any], apart: int = 0) -> None:
    """AssertionError where `unchanged` of some steps is not the count of equal weights before and after them.

    The two may be so many weights `apart`.
    """
    counts = [int((old == new).sum()) for old, new in pairwise(seen)]
    assert np.abs(np.subtract([int(number) for number in measured], counts)).max() <= apart, (measured, counts)
    assert all(0 < count < seen[0].size for count in counts)
