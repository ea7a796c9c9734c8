"""Random steps on the cpu backend: whatever an author writes, NumPy makes the same of it bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rulec.compiler.layout import layout_for
from tests.backends.cpu_programs import Array, bucket_of, program_of

_UNARY = ("sqrt", "rsqrt", "cbrt", "abs", "sign", "exp", "log", "tanh", "sigmoid", "erf", "floor", "-")
_BINARY = ("{} + {}", "{} - {}", "{} * {}", "{} / {}", "{} // {}", "minimum({}, {})", "maximum({}, {})", "({})**({})")
_TRUTH = (
    "{} < {}",
    "{} >= {}",
    "{} == {}",
    "{} != {}",
    "isfinite({}) and {} > 0",
    "not ({} <= {})",
    "{} > 0 or {} < 0",
)

_leaves = st.sampled_from(["g", "p", "m", "a", "lr", "0.1", "2", "1e-8", "-3.5", "0", "1e30"])


def _deeper(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    unary = st.tuples(st.sampled_from(_UNARY), inner).map(lambda t: f"({t[0]}({t[1]}))")
    binary = st.tuples(st.sampled_from(_BINARY), inner, inner).map(lambda t: f"({t[0].format(t[1], t[2])})")
    truth = st.tuples(st.sampled_from(_TRUTH), inner, inner).map(lambda t: f"({t[0].format(t[1], t[2])})")
    choice = st.tuples(truth, inner, inner).map(lambda t: f"where({t[0]}, {t[1]}, {t[2]})")
    return unary | binary | choice | truth


#: Every expression has an element in it: what has none belongs to the scalar program, and is no kernel.
expressions = st.recursive(_leaves, _deeper, max_leaves=6).map(lambda e: f"where(g > m, 1, 2) + {e}")

_AWKWARD = [0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 1e-45, 1e-310, 65504.0, 1e38, 1e300]


def _sprinkle(array: Array, offset: int) -> None:
    """Awkward numbers among the ordinary ones, at other places in each buffer."""
    with np.errstate(over="ignore"):
        values = np.roll(np.array(_AWKWARD), offset).astype(array.dtype)
    array[: len(values)] = values[: array.size]


@pytest.mark.parametrize("count", [4, pytest.param(25, marks=pytest.mark.slow)])
def test_random_steps_equal_numpy(count: int) -> None:
    drawn = given(
        state=expressions, update=expressions, size=st.integers(1, 100), maximize=st.booleans(),
        dtypes=st.tuples(*[st.sampled_from(["float32", "float64", "float16"])] * 3),
    )  # fmt: skip
    settings(max_examples=count, deadline=None, suppress_health_check=[HealthCheck.too_slow])(drawn(check))()


def check(state: str, update: str, size: int, maximize: bool, dtypes: tuple[str, str, str]) -> None:
    text = f"m = {state}\np = {update}"
    layout = layout_for(program_of(text), dtypes[0], dtypes[1], {"m": dtypes[2]}, maximize)
    bucket = bucket_of(text, [size, 3], layout)
    for offset, array in enumerate([*bucket.params, *bucket.grads, *(s["m"] for s in bucket.states)]):
        _sprinkle(array, 5 * offset)
    wanted = [bucket.expected(i) for i in range(2)]
    bucket.call()(0, bucket.grads, bucket.rows)
    for tensor in range(2):
        for name, values in wanted[tensor].items():
            assert np.array_equal(bucket.buffers(tensor)[name], values, equal_nan=True), name
