"""bfloat16 weights in parts in MLX: the steps of float32."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core")

import rulec.mlx  # noqa: E402
from rulec.errors import HyperError  # noqa: E402

DRAWS = np.random.default_rng(0)
FIRST = DRAWS.standard_normal((24, 40)).astype(np.float32)
GRADS = [DRAWS.standard_normal((24, 40)).astype(np.float32) for _ in range(10)]


def train(kind: str, dtype: Any) -> tuple[Any, Any]:
    """The weights after ten small steps, in float32, and their states."""
    params = {"w": mx.array(FIRST).astype(mx.bfloat16).astype(dtype)}
    optimizer = rulec.mlx.AdamW(1e-4, weights=kind)
    for grad in GRADS:
        params = optimizer.apply_gradients({"w": mx.array(grad).astype(mx.bfloat16)}, params)
    return np.array(params["w"].astype(mx.float32)), optimizer.state["w"]


def test_split_and_master_weights_take_the_steps_of_float32() -> None:
    exact, _ = train("", mx.float32)
    high, states = train("split", mx.bfloat16)
    low = np.array(states["param::low"])
    assert low.dtype == np.int16
    assert np.array_equal((high.view(np.int32) + low.astype(np.int32)).view(np.float32), exact)
    _, states = train("master", mx.bfloat16)
    assert np.array_equal(np.array(states["param::master"]), exact)


def test_plain_weights_stand_still_where_stochastic_ones_move() -> None:
    plain, _ = train("", mx.bfloat16)
    moved, _ = train("stochastic", mx.bfloat16)
    start = np.array(mx.array(FIRST).astype(mx.bfloat16).astype(mx.float32))
    large = np.abs(start) > 0.5  # half an ulp is more than a step
    assert np.array_equal(plain[large], start[large])
    assert not np.array_equal(moved[large], start[large])


def test_an_unknown_kind_is_one_sentence() -> None:
    with pytest.raises(HyperError, match="none of split"):
        rulec.mlx.AdamW(1e-4, weights="splt")
