"""The elementary functions of the cpu backend: their stated ulps, special values, and what must not move their bits.

float32 is compared with float64 arithmetic over numbers of every size, float64 with mpmath.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import mpmath
import numpy as np
import pytest

from rulec_backends.cpu import machine as cpu_machine
from rulec_backends.cpu import math as cpu_math
from tests.backends.cpu_functions import Array, assembly_text, elementary, function
from tests.backends.vectors import wide_register

#: The greatest error that the docstrings of cpu_math promise, in ulps, for float32 and float64.
STATED = {
    "exp": (1.1, 1.1), "log": (1, 1), "tanh": (3, 3), "sigmoid": (2.5, 2.5), "cbrt": (0.9, 0.9), "erf": (1.5, 1.5),
    "rsqrt": (1.5, 1.5), "sqrt": (0.5, 0.5), "inverse": (0.5, 0.5),
    "inverse_square": (2.5, 2.5), "root": (0.5, 0.5), "inverse_root": (1.5, 1.5), "power": (2.5, 1.2),
    "log1p": (1, 1), "expm1": (1.3, 1.6),
}  # fmt: skip

WIDE: dict[str, Callable[..., Any]] = {
    "exp": np.exp, "log": np.log, "tanh": np.tanh, "cbrt": np.cbrt, "rsqrt": lambda x: 1 / np.sqrt(x), "sqrt": np.sqrt,
    "sigmoid": lambda x: np.where(x < 0, np.exp(-np.abs(x)), 1) / (1 + np.exp(-np.abs(x))),
    "erf": np.vectorize(math.erf, otypes=[float]), "inverse": lambda x: x**-1.0, "inverse_square": lambda x: x**-2.0,
    # An array of exponents: for the scalar 0.5 NumPy takes the square root, which differs from C's pow at -inf and -0.
    "root": lambda x: np.power(x, np.full_like(x, 0.5)), "inverse_root": lambda x: np.power(x, np.full_like(x, -0.5)),
    "power": np.power, "log1p": np.log1p, "expm1": np.expm1,
}  # fmt: skip

#: Each function in mpmath, and where it is defined.
EXACT: dict[str, Callable[..., Any]] = {
    "exp": mpmath.exp, "log": mpmath.log, "tanh": mpmath.tanh, "cbrt": lambda x: mpmath.sign(x) * mpmath.cbrt(abs(x)),
    "sigmoid": lambda x: 1 / (1 + mpmath.exp(-x)), "erf": mpmath.erf, "rsqrt": lambda x: 1 / mpmath.sqrt(x),
    "sqrt": mpmath.sqrt, "inverse": lambda x: 1 / x, "inverse_square": lambda x: 1 / x**2, "root": mpmath.sqrt,
    "inverse_root": lambda x: 1 / mpmath.sqrt(x), "power": mpmath.power, "log1p": mpmath.log1p,
    "expm1": mpmath.expm1,
}  # fmt: skip
POSITIVE = ("log", "sqrt", "rsqrt", "root", "inverse_root", "power")

SPECIAL = [
    0.0, 1.0, 2.0, 3.0, 4.0, 0.5, 1 / 3, 1e30, 1e-30, 16777215.0, 16777216.0, 1e-45, 1.17e-38, 0.9999999, math.inf,
]  # fmt: skip


def every_size(dtype: str, count: int) -> Array:
    """Numbers whose bits are spread evenly: every exponent, both signs, subnormal numbers, infinities and NaN."""
    unsigned = np.uint32 if dtype == "float32" else np.uint64
    step = 2 ** (8 * np.dtype(unsigned).itemsize) // count
    bits = np.arange(count, dtype=np.uint64) * np.uint64(step) + np.uint64(step // 3)
    specials = np.array([*SPECIAL, *(-x for x in SPECIAL), math.nan], dtype)
    return np.concatenate([bits.astype(unsigned).view(dtype), specials])


def ulp(value: Array, dtype: str) -> Array:
    """The distance between neighbouring numbers of `dtype` at each value."""
    info = np.finfo(dtype)
    exponent = np.maximum(np.frexp(value)[1] - 1, info.minexp) - info.nmant
    return np.ldexp(np.ones_like(value), exponent)


def assert_same_class(got: Array, wanted: Array) -> None:
    """The same NaN, infinities and zeros."""
    assert np.array_equal(np.isnan(got), np.isnan(wanted))
    assert np.array_equal(got[np.isinf(wanted)], wanted[np.isinf(wanted)])
    zero = wanted == 0
    assert np.array_equal(np.signbit(got[zero & (got == 0)]), np.signbit(wanted[zero & (got == 0)]))


@pytest.mark.parametrize("name", [n for n in WIDE if n != "power"])
def test_single_precision(name: str) -> None:
    x = every_size("float32", 10_000 if name == "erf" else 100_000)
    got = elementary(name, "float32")(x)
    with np.errstate(all="ignore"):
        wanted = WIDE[name](x.astype(np.float64))
        assert_same_class(got, wanted.astype(np.float32))
        finite = np.isfinite(wanted) & np.isfinite(got)
        error = np.abs(got[finite] - wanted[finite]) / ulp(wanted[finite], "float32")
    # The stated bound, and what the float64 reference itself may be wrong by.
    assert error.max() <= STATED[name][0] + 1e-6, x[finite][error.argmax()]


@pytest.mark.parametrize("name", [n for n in EXACT if n != "power"])
def test_double_precision(name: str) -> None:
    ordinary = np.random.default_rng(1).standard_normal(1000) * np.exp(np.linspace(-30, 6, 1000))
    x = np.concatenate([ordinary, every_size("float64", 500)])
    x = x[np.isfinite(x) & (x != 0) & ((x > 0) | (name not in POSITIVE)) & ((x > -1) | (name != "log1p"))]
    got = elementary(name, "float64")(x)
    assert greatest_error(got, [x], EXACT[name]) <= STATED[name][1]


def greatest_error(got: Array, arguments: list[Array], exact: Callable[..., Any]) -> float:
    """In ulps, where the exact value is neither beyond the largest float64 nor nothing."""
    worst = 0.0
    with mpmath.workdps(40):
        for value, *args in zip(got.tolist(), *(a.tolist() for a in arguments), strict=True):
            wanted = exact(*map(mpmath.mpf, args))
            if abs(wanted) > mpmath.mpf(np.finfo(np.float64).max):
                assert math.isinf(value)
                continue
            unit = ulp(np.array([float(wanted)]), "float64")[0]
            worst = max(worst, float(abs(wanted - mpmath.mpf(value)) / mpmath.mpf(float(unit))))
    return worst


def power_arguments(dtype: str, count: int) -> tuple[Array, Array]:
    """Bases of every size and near one, with exponents that spread the results over the whole range."""
    random = np.random.default_rng(2)
    largest = 104 if dtype == "float32" else 745
    wide = np.exp(random.uniform(-80, 80, count))
    near = 1 + random.standard_normal(count) * np.exp(random.uniform(-14, -2, count))
    x = np.abs(np.concatenate([wide, near])).astype(dtype)
    x = x[x != 1]
    y = random.uniform(-largest, largest, x.size) / np.log(x.astype(np.float64))
    return x, y.astype(dtype)


def test_power_single_precision() -> None:
    x, y = power_arguments("float32", 60_000)
    got = elementary("power", "float32")(x, y)
    with np.errstate(all="ignore"):
        wanted = np.power(x.astype(np.float64), y.astype(np.float64))
        assert_same_class(got, wanted.astype(np.float32))
        finite = np.isfinite(got)
        error = np.abs(got[finite] - wanted[finite]) / ulp(wanted[finite], "float32")
    assert error.max() <= STATED["power"][0]


def test_power_double_precision() -> None:
    x, y = power_arguments("float64", 600)
    assert greatest_error(elementary("power", "float64")(x, y), [x, y], mpmath.power) <= STATED["power"][1]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_power_of_special_values_is_that_of_c(dtype: str) -> None:
    values = np.array([*SPECIAL, *(-x for x in SPECIAL), math.nan], dtype)
    x, y = (np.ascontiguousarray(a.ravel()) for a in np.meshgrid(values, values))
    got = elementary("power", dtype)(x, y)
    with np.errstate(all="ignore"):
        wanted = np.power(x.astype(np.float64), y.astype(np.float64))
    assert_same_class(got, wanted.astype(dtype) if dtype == "float64" else _narrowed(wanted))


def _narrowed(wide: Array) -> Array:
    with np.errstate(all="ignore"):
        return wide.astype(np.float32)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_minimum_maximum_and_sign(dtype: str) -> None:
    values = np.array([-math.inf, -1, 0, 2, math.inf, math.nan], dtype)
    x, y = (np.ascontiguousarray(a.ravel()) for a in np.meshgrid(values, values))
    assert np.array_equal(elementary("minimum", dtype)(x, y), np.minimum(x, y), equal_nan=True)
    assert np.array_equal(elementary("maximum", dtype)(x, y), np.maximum(x, y), equal_nan=True)
    assert np.array_equal(elementary("sign", dtype)(values), np.sign(values), equal_nan=True)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_remainder_is_numpys(dtype: str) -> None:
    values = np.array([-math.inf, -7.5, -3, -0.0, 0.0, 0.3, 2, 7, 1e30, math.inf, math.nan], dtype)
    x, y = (np.ascontiguousarray(a.ravel()) for a in np.meshgrid(values, values))
    with np.errstate(all="ignore"):
        wanted = np.mod(x, y)
    # Where the divisor is infinite and of the other sign, exact arithmetic says the divisor, and so does NumPy.
    assert np.array_equal(elementary("remainder", dtype)(x, y), wanted, equal_nan=True)


FUNCTIONS = ("exp", "log", "tanh", "sigmoid", "erf", "cbrt", "rsqrt", "power")


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_vector_body_and_the_scalar_tail_agree(name: str, dtype: str) -> None:
    call = elementary(name, dtype)
    x = every_size(dtype, 1000)
    arguments = (x, np.roll(x, 333)) if name == "power" else (x,)
    together = call(*arguments)
    alone = np.concatenate([call(*(a[i : i + 1] for a in arguments)) for i in range(x.size)])
    assert np.array_equal(together, alone, equal_nan=True)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", ["exp", "power", "sigmoid"])
def test_processors_without_a_scaling_instruction_give_the_same_bits(
    name: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = every_size(dtype, 5000)
    arguments = (x, np.roll(x, 333)) if name == "power" else (x,)
    texts, results = [], []
    for scales in (cpu_math.scales_in_one(), False):
        monkeypatch.setattr(cpu_math, "scales_in_one", lambda scales=scales: scales)
        assembly_text.cache_clear()
        texts.append(assembly_text(f"{name}(x0)", (name,), dtype, dtype, 1) if name != "power" else "")
        results.append(elementary(name, dtype)(*arguments))
    assembly_text.cache_clear()
    assert "llvm.ldexp" not in texts[1]
    assert np.array_equal(*results, equal_nan=True)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_loops_are_vectors_of_full_width(name: str, dtype: str) -> None:
    inputs = 2 if name == "power" else 1
    arguments = ", ".join(f"x{i}" for i in range(inputs))
    text = assembly_text(f"{name}({arguments})", (name,), dtype, dtype, inputs)
    register = wide_register()
    assembly = cpu_machine.emit_assembly(text)
    assert len(re.findall(register, assembly)) > 5
    assert "@" not in assembly.replace("@function", "").replace("@object", "").replace("@progbits", ""), (
        "calls a library"
    )


def test_a_constant_exponent_of_a_kernel_is_the_function_of_two() -> None:
    x = np.abs(every_size("float32", 1000))
    constant = function("power(x0, float32(0.3))", ("power",), "float32")(x)
    assert np.array_equal(constant, elementary("power", "float32")(x, np.full_like(x, 0.3)), equal_nan=True)
