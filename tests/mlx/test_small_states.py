"""States in codes under MLX: as states in floats that are rounded by the definition after every step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core")

import rulec.mlx  # noqa: E402
from rulec.array import Optimizer  # noqa: E402
from rulec.errors import HyperError, StateMismatch  # noqa: E402
from rulec.formats import decode, encode, parse  # noqa: E402

SHAPE = (72, 80)
FORMS = {
    "m": parse("dynamic8").for_state(signed=True, floor=False),
    "v": parse("dynamic8").for_state(signed=False, floor=True),
}


def draws(seed: int) -> dict[str, Any]:
    numbers = np.random.default_rng(seed)
    return {
        "large": mx.array(numbers.standard_normal(SHAPE).astype(np.float32)),
        "small": mx.array(numbers.standard_normal(8).astype(np.float32)),
    }


def test_a_run_in_codes_is_a_run_in_floats_rounded_after_each_step() -> None:
    kind = rulec.mlx.optimizer("adamw")
    optimizers = kind(0.01, state_dtype="dynamic8"), kind(0.01)
    params = [draws(0), draws(0)]
    for seed in range(1, 4):
        params = [o.apply_gradients(draws(seed), p) for o, p in zip(optimizers, params, strict=True)]
        coded, floats = (o.state["large"] for o in optimizers)
        for name, form in FORMS.items():
            array = np.array(floats[name])
            floats[name] = mx.array(decode(form, *encode(form, array), SHAPE))
            ours = decode(form, np.array(coded[name]), np.array(coded[f"{name}::scale"]), SHAPE)
            assert np.mean(ours == np.array(floats[name])) > 0.99
    assert coded["m"].dtype == coded["v"].dtype == mx.uint8
    assert optimizers[0].state["small"]["m"].dtype == mx.float32
    assert "m::scale" not in optimizers[0].state["small"]
    for name in params[0]:
        np.testing.assert_allclose(np.array(params[0][name]), np.array(params[1][name]), atol=0.002)


def test_a_name_of_mlx_takes_formats_too() -> None:
    optimizer = rulec.mlx.AdamW(0.01, state_dtype={"m": "int8"})
    optimizer.apply_gradients(draws(1), draws(0))
    assert optimizer.state["large"]["m"].dtype == mx.int8
    assert optimizer.state["large"]["v"].dtype == mx.float32


def test_what_cannot_be_is_refused() -> None:
    kind = rulec.mlx.optimizer("adamw")
    with pytest.raises(HyperError, match="no power of two"):
        kind(0.01, state_dtype={"v": "int8/33"})
    coded, floats = kind(0.01, state_dtype="int8"), kind(0.01)
    coded.apply_gradients(draws(1), draws(0))
    floats.apply_gradients(draws(1), draws(0))
    floats.state = coded.state
    with pytest.raises(StateMismatch, match="is not in the format that state_dtype names"):
        floats.apply_gradients(draws(1), draws(0))


@pytest.mark.parametrize("rule", ["adamw", "adagrad", "lion", "adafactor"])
def test_states_that_are_rounded_at_random_have_the_bits_of_plain_arrays(rule: str) -> None:
    optimizer = rulec.mlx.optimizer(rule)(0.01, state_dtype="bfloat16_sr", seed=3)
    params, arrays = draws(0), {name: np.array(p) for name, p in draws(0).items()}
    plain = Optimizer(rule, arrays, "numpy", state_dtype="bfloat16_sr", seed=3, lr=0.01)
    for seed in (1, 2, 3):
        params = optimizer.apply_gradients(draws(seed), params)
        plain.step({name: np.array(g) for name, g in draws(seed).items()})
    for name in params:
        for key, expected in plain.state(name).items():
            if key != "step":
                ours = optimizer.state[name][key]
                assert ours.dtype == mx.bfloat16
                assert np.array_equal(np.array(ours.astype(mx.float32)), expected.astype(np.float32)), (name, key)


def test_a_class_of_mlx_takes_a_seed_for_them() -> None:
    states = []
    for seed in (0, 1):
        optimizer = rulec.mlx.AdamW(0.01, state_dtype={"v": "bfloat16_sr"}, seed=seed)
        optimizer.apply_gradients(draws(1), draws(0))
        assert optimizer.state["large"]["m"].dtype == mx.float32
        states.append(np.array(optimizer.state["large"]["v"].astype(mx.float32)))
    assert not np.array_equal(*states)


def test_a_float32_state_put_in_its_place_stays_float32() -> None:
    optimizer = rulec.mlx.optimizer("adagrad")(0.01, state_dtype="bfloat16_sr")
    params = optimizer.apply_gradients(draws(1), draws(0))
    optimizer.state["large"]["s"] = mx.full(SHAPE, 1 + 2.0**-20)
    optimizer.apply_gradients({name: mx.zeros_like(p) for name, p in params.items()}, params)
    assert np.array_equal(np.array(optimizer.state["large"]["s"]), np.full(SHAPE, 1 + 2.0**-20, np.float32))
