"""Quotients of square roots beside states in codes: the printed function, with exact fused multiply-adds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rulec.backend import registry
from rulec_backends.triton.ops import NAME, SOURCE
from tests.backends.coded_training import signed, training

Array = np.ndarray[Any, Any]


def fused(x: Any, y: Any, z: Any) -> Array:
    """x*y + z of float32, rounded once: a rounded sum in the middle of two numbers goes to the side of its rest."""
    product, addend = np.float64(x) * np.float64(y), np.float64(z)
    total = product + addend
    other = total - product
    rest = (product - (total - other)) + (addend - other)
    near: Array = total.astype(np.float32)
    apart = total - near.astype(np.float64)
    beside = np.nextafter(near, np.where(apart > 0, np.float32(np.inf), np.float32(-np.inf)))
    is_middle = 2 * np.abs(apart) == np.abs(beside.astype(np.float64) - near.astype(np.float64))
    return np.where(is_middle & (np.sign(rest) == np.sign(apart)) & (rest != 0), beside, near)


def quotient_of_root() -> Any:
    """The printed function, over NumPy's arrays."""
    language = SimpleNamespace(
        fma=fused, div_rn=np.divide, where=np.where, abs=np.abs, float32=np.float32,
        full=lambda shape, value, dtype: np.full(shape, value, dtype),
        broadcast_to=lambda value, shape: np.broadcast_to(np.float32(value), shape),
    )  # fmt: skip
    names: dict[str, Any] = {"tl": language, "triton": SimpleNamespace(jit=lambda function: function)}
    exec(SOURCE.replace("div_rn(1.0,", "div_rn(tl.float32(1.0),"), names)  # noqa: S102
    return names[NAME]


def divisors() -> list[float]:
    """Divisors next to the ends of a power of two, at and beyond the bounds, and some between."""
    near_two = [2 - k * 2.0**-23 for k in (1, 2, 3, 5, 255, 4095, 4097)]
    others = [1.0, 1 + 2.0**-23, 1 / 3, 0.1, 0.03160696, 2.0**-49, 2.0**49, 2.0**-51, 2.0**51, 0.0, -3.0, 2.0**-140]
    return [
        *near_two,
        *others,
        3 * 2.0**100,
        1.7 * 2.0**125,
        1.3 * 2.0**-100,
        1.3 * 2.0**-125,
        3.0e38,
        float("inf"),
        float("nan"),
    ]


@pytest.mark.parametrize("divisor", divisors())
def test_quotients_are_those_of_a_division(divisor: float) -> None:
    rng = np.random.default_rng(1)
    fractions = np.concatenate(
        [np.arange(0, 1 << 15), (1 << 23) - np.arange(1, 1 << 15), rng.integers(0, 1 << 23, 1 << 16)]
    )
    exponents = rng.integers(127 - 75, 127 + 64, fractions.size)
    roots = np.concatenate([fractions | (127 << 23), fractions | exponents << 23]).astype(np.uint32).view(np.float32)
    # Over 3*2**100, these are in the middle of two subnormal numbers.
    middles = np.float32(3 * 2.0**-50) * np.arange(1, 2000, dtype=np.float32)
    roots = np.concatenate([roots, middles, np.float32([0.0, -0.0, np.inf, np.nan, 2.0**-74.5])])
    with np.errstate(all="ignore"):
        found = quotient_of_root()(roots, np.float32(divisor))
        wanted = roots / np.float32(divisor)
    numbers = ~np.isnan(wanted)
    assert (np.isnan(found) != numbers).all()
    assert found[numbers].tobytes() == wanted[numbers].tobytes()


def test_stages_with_states_in_codes_use_it() -> None:
    case = training("adamw", {"m": signed("int8")}, (4096,))
    backend = registry.get("triton")
    assert f"sigma = {NAME}(tl.sqrt_rn(v_new), sqrt_one_minus_beta2_t)" in backend.emit(case.program, case.layout)
    assert NAME not in backend.emit(case.program, case.layout.decoded)
