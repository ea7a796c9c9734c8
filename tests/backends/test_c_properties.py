"""Random rules, shapes and dtypes: compiled C against NumPy and the reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import rulec
from rulec.array import Optimizer
from rulec.backend import registry
from rulec.testing import IEEE, NumpyKind
from rulec.testing.trial import Subject
from rulec.testing.whole import check_against_reference
from rulec_backends.c import CBackend
from tests.properties import reducing
from tests.properties.reducing import reducing_rules
from tests.properties.test_backends_agree import rules, shapes

pytestmark = pytest.mark.skipif(CBackend().unavailable_reason() is not None, reason="there is no C compiler")

_SPECIAL = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40, -1e-310, 1e30, 1.0, -1.0]


def drawn(random: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Numbers of many sizes, some of them special."""
    with np.errstate(all="ignore"):
        values = random.normal(size=shape) * 10.0 ** random.integers(-3, 3)
        return np.asarray(np.where(random.random(shape) < 0.2, random.choice(_SPECIAL, shape), values), dtype)


def bits(text: str, backend: str, seed: int, shapes: list[tuple[int, ...]], dtype: str) -> list[np.ndarray]:
    """Parameters and states after two steps; every NaN as the same one."""
    random = np.random.default_rng(seed)
    params = [drawn(random, s, dtype) for s in shapes]
    opt = Optimizer(rulec.parse(text), params, backend)
    for _ in range(2):
        with np.errstate(all="ignore"):
            opt.step([drawn(random, s, dtype) for s in shapes])
    found = [*params, *(opt.state(name)[s] for name in opt.names for s in ("a", "b"))]
    return [np.where(np.isnan(x), np.asarray(np.nan, x.dtype), x) for x in found]


def a_few_and_many(few: int, many: int) -> pytest.MarkDecorator:
    """How many examples there are every day, and among the slow tests."""
    return pytest.mark.parametrize("count", [few, pytest.param(many, marks=pytest.mark.slow)])


def check_examples(count: int, check: Callable[..., None], *drawn: st.SearchStrategy[Any]) -> None:
    """Checks so many."""
    settings(max_examples=count, deadline=None, suppress_health_check=list(HealthCheck))(given(*drawn)(check))()


@a_few_and_many(6, 40)
def test_c_and_numpy_give_the_same_bits(count: int) -> None:
    dtypes = st.sampled_from(["float32", "float64", "float16"])
    check_examples(count, same_bits, rules(), shapes, dtypes, st.integers(0, 2**31))


def same_bits(text: str, shapes: list[tuple[int, ...]], dtype: str, seed: int) -> None:
    ours, plain = (bits(text, backend, seed, shapes, dtype) for backend in ("c", "numpy"))
    for c, numpy in zip(ours, plain, strict=True):
        assert c.tobytes() == numpy.tobytes(), text


@pytest.mark.filterwarnings("ignore:.*skipped the step:RuntimeWarning")
@a_few_and_many(4, 30)
def test_c_follows_the_reference_through_reductions_levels_and_branches(count: int) -> None:
    check_examples(count, follows, reducing_rules(), reducing.shapes, st.integers(0, 1000), st.booleans())


def follows(text: str, shapes: list[tuple[int, ...]], seed: int, special: bool) -> None:
    check_against_reference(Subject(registry.get("c"), NumpyKind(), IEEE), rulec.parse(text), shapes, seed, special)
