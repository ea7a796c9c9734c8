"""Quotients by numbers of the scalar table in Triton: the printed text of PTX, run over NumPy's arrays."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from rulec.backend import registry
from rulec_backends.triton.words import WORDS
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


def _words(x: Any) -> Array:
    return np.asarray(x, np.float32).view(np.uint32)


#: The instructions of the text, over arrays with a value for each thread.
INSTRUCTIONS: Mapping[str, Callable[..., Any]] = {
    "mul.rn.f32": np.multiply, "neg.f32": np.negative, "fma.rn.f32": fused, "div.rn.f32": np.divide, "mov.b32": _words,
    "add.u32": lambda a, b: a + np.uint32(b), "and.b32": lambda a, b: a & np.uint32(b),
    "setp.ne.b32": lambda a, b: a != np.uint32(b), "setp.nan.f32": lambda a, b: np.isnan(a) | np.isnan(b),
    "setp.neu.or.f32": lambda a, b, c: (a != np.float32(b)) | c,
}  # fmt: skip


def instructions() -> list[list[str]]:
    """The predicate, the name and the operands of each instruction."""
    text = re.search(r'"""\{(.*?)\}"""', WORDS["quotient"], re.DOTALL)
    assert text
    found = re.findall(r"^\s*(?:@(\w+) )?([a-z]\w*(?:\.\w+)+|bra) (.*);$", text[1], re.MULTILINE)
    return [[predicate, name, *operands.split(", ")] for predicate, name, operands in found]


def quotients(x: Array, divisor: np.float32, inverse: np.float32) -> Array:
    """The quotients of pairs of numbers, as threads compute them."""
    pairs = x.reshape(-1, 2).T
    known: dict[str, Any] = {"$2": pairs[0], "$3": pairs[1]}
    known |= dict.fromkeys(("$4", "$5"), np.full_like(pairs[0], divisor))
    known |= dict.fromkeys(("$6", "$7"), np.full_like(pairs[0], inverse))
    goes_on = np.ones(pairs.shape[1], bool)
    for predicate, name, *operands in instructions():
        runs = goes_on & (known[predicate] if predicate else True)
        if name == "bra":
            goes_on = goes_on & ~runs
            continue
        result, *given = operands
        value = INSTRUCTIONS[name](*(known[g] if g in known else int(g.removeprefix("0f"), 0) for g in given))
        known[result] = np.where(runs, value, known[result]) if result in known else value
    found: Array = np.stack([known["$0"], known["$1"]], 1).ravel()
    return found


def reciprocal(divisor: np.float32) -> np.float32:
    """The printed function."""
    bounds = [float(x) for x in re.findall(r"[<>]= ([\d.e+-]+)\)", WORDS["reciprocal"])]
    assert len(bounds) == 2
    return np.float32(1) / divisor if bounds[0] <= divisor <= bounds[1] else np.float32(np.nan)


def divisors() -> list[float]:
    """Divisors next to the ends of a power of two, at and beyond the bounds, and some between."""
    near_two = [2 - k * 2.0**-23 for k in (1, 2, 3, 5, 255, 4095, 4097)]
    others = [1.0, 1 + 2.0**-23, 1 / 3, 0.1, 0.03160696, 2.0**-22, 2.0**-23, 2.0**125, 2.0**126, 0.0, -3.0]
    return [*near_two, *others, 2.0**-140, 3 * 2.0**100, 1.3 * 2.0**-125, float("inf"), float("nan")]


@pytest.mark.parametrize("divisor", divisors())
def test_quotients_are_those_of_a_division(divisor: float) -> None:
    rng = np.random.default_rng(1)
    fractions = np.concatenate(
        [np.arange(0, 1 << 12), (1 << 23) - np.arange(1, 1 << 12), rng.integers(0, 1 << 23, 9999)]
    )
    signs, exponents = rng.integers(0, 2, fractions.size) << 31, rng.integers(0, 256, fractions.size)
    bits = [fractions | (127 << 23), fractions | exponents << 23 | signs, fractions | (127 - 80) << 23]
    # Over 3*2**100, some of these are in the middle of two subnormal numbers.
    middles = np.float32(3 * 2.0**-50) * np.arange(1, 2000, dtype=np.float32)
    special = np.float32([0.0, -0.0, np.inf, -np.inf, np.nan, 2.0**-74.5, 0.0, 1.0])
    x = np.concatenate([np.concatenate(bits).astype(np.uint32).view(np.float32), middles, special])
    x = x[: x.size // 2 * 2]
    with np.errstate(all="ignore"):
        found = quotients(x, np.float32(divisor), reciprocal(np.float32(divisor)))
        wanted = x / np.float32(divisor)
    numbers = ~np.isnan(wanted)
    assert (np.isnan(found) != numbers).all()
    assert found[numbers].tobytes() == wanted[numbers].tobytes()


def test_zeros_are_not_divided() -> None:
    """Rows of an embedding without a gradient are zeros: divided, they would take as long as before."""
    x = np.float32([0.0, -0.0])
    divided = [line for line in instructions() if line[1] == "div.rn.f32"]
    assert len(divided) == 2
    assert all(predicate for predicate, *_ in divided)
    assert np.signbit(quotients(x, np.float32(3), np.float32(1) / np.float32(3))).tolist() == [False, True]


@pytest.mark.parametrize("coded", [False, True])
def test_stages_use_it(coded: bool) -> None:
    case = training("adamw", {"m": signed("int8")}, (4096,))
    layout = case.layout if coded else case.layout.decoded
    text = registry.get("triton").emit(case.program, layout)
    assert "sigma = quotient(tl.sqrt_rn(v_new), sqrt_one_minus_beta2_t, sqrt_one_minus_beta2_t_inverse)" in text
    assert "sqrt_one_minus_beta2_t_inverse = reciprocal(sqrt_one_minus_beta2_t)" in text
