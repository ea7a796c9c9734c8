"""The records of operations: special values as IEEE 754 has them, and errors, on every backend that can run here."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from typing import Any

import mpmath
import numpy as np
import pytest

import rulec
from rulec.array.optimizer import Optimizer
from rulec.language.expr.arithmetic import NUMPY, mpmath_table
from rulec.language.expr.ops import SPECS, Kind, Op
from rulec_backends.c import CBackend

Array = np.ndarray[Any, Any]

#: Functions with a stated error and special values.
STATED = [op for op, spec in SPECS.items() if op.kind is Kind.FUNCTION and spec.special and op is not Op.ISFINITE]
#: Those that every backend has, in a rule that takes little time to compile: functions beside x, y -> what they are.
ADDED = ("log1p", "expm1", "hypot")


def rule_of(name: str) -> rulec.Rule:
    arguments = ", ".join(("g", "p")[: SPECS[Op[name.upper()]].arity])
    return rulec.parse(f"name: R\nstate: {{s: 0}}\nstep: |\n  s = where(t > 0, {name}({arguments}), s)\n  p = p\n")


def on_arrays(backend: str, name: str, *arrays: Array) -> Array:
    """The function by a kernel, over NumPy's arrays: of `g`, and of `p` where it takes two."""
    p = arrays[1].copy() if len(arrays) > 1 else np.ones_like(arrays[0])
    opt = Optimizer(rule_of(name), [p], backend=backend)
    with np.errstate(all="ignore"):
        opt.step([arrays[0]])
    return np.asarray(opt.state("0")["s"])


def by_jax(name: str, *arrays: Array) -> Array:
    import jax

    import rulec.jax

    p = arrays[1] if len(arrays) > 1 else np.ones_like(arrays[0])
    transform = rulec.jax.transform(rule_of(name))
    with jax.enable_x64(True):
        _, state = jax.jit(transform.update)([arrays[0]], transform.init([p]), [p])
        return np.asarray(state.s[0])


def by_mlx(name: str, *arrays: Array) -> Array:
    import mlx.core as mx

    from rulec_backends.mlx import words

    with mx.stream(mx.cpu):
        function = words.FORMULAS.get(name) or getattr(mx, name)
        return np.array(function(*(mx.array(x, getattr(mx, x.dtype.name)) for x in arrays)))


WAYS: dict[str, Callable[..., Array]] = {
    "numpy": lambda *args: on_arrays("numpy", *args), "cpu": lambda *args: on_arrays("cpu", *args),
    "c": lambda *args: on_arrays("c", *args), "jax": by_jax, "mlx": by_mlx,
}  # fmt: skip


def skip_without(way: str) -> None:
    if way in ("jax", "mlx") and importlib.util.find_spec(way) is None:
        pytest.skip(f"{way} is not installed")
    if way == "c" and CBackend().unavailable_reason() is not None:
        pytest.skip("there is no C compiler")


def points(name: str, dtype: str, count: int) -> list[Array]:
    """Operands of every size, near zero, and near the ends of the domain."""
    random = np.random.default_rng(3)
    spread = random.standard_normal(count) * np.exp(random.uniform(-40, 5, count))
    ends = [-1 + np.exp(random.uniform(-36, -0.1, count)), random.uniform(-1, 2, count)]
    x = np.concatenate([spread, *ends, -np.exp(random.uniform(-5, 4.4, count))]).astype(dtype)
    x = x[x > -1] if name == "log1p" else x
    return [x, np.roll(x, 7)][: SPECS[Op[name.upper()]].arity]


def worst(got: Array, operands: list[Array], name: str, dtype: str) -> float:
    """The greatest error in ulps of the result, for results that are normal numbers."""
    exact, info, found = getattr(mpmath, name), np.finfo(dtype), 0.0
    with mpmath.workdps(40):
        for value, *args in zip(got.tolist(), *(a.tolist() for a in operands), strict=True):
            wanted = exact(*map(mpmath.mpf, args))
            if float(info.tiny) < abs(wanted) < float(info.max):
                unit = np.spacing(np.abs(np.asarray(float(wanted), dtype)))
                found = max(found, float(abs(mpmath.mpf(value) - wanted) / mpmath.mpf(float(unit))))
    return found


@pytest.mark.parametrize("op", STATED, ids=lambda op: op.name)
def test_special_values_are_those_of_the_record(op: Op) -> None:
    """In NumPy's meaning and in 50 digits, where zeros have no sign."""
    for *operands, wanted in SPECS[op].special:
        with np.errstate(all="ignore"):
            value = float(NUMPY[op](*map(np.float64, operands)))
        np.testing.assert_equal(value, wanted)
        assert math.isnan(wanted) or math.copysign(1, value) == math.copysign(1, wanted)
        if any(math.copysign(1, x) < 0 and x == 0 for x in operands) and op is Op.RSQRT:
            continue
        np.testing.assert_equal(float(mpmath_table()[op](*map(mpmath.mpf, operands))), wanted + 0.0)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ADDED)
def test_backends_have_the_record_s_special_values(name: str, way: str, dtype: str) -> None:
    skip_without(way)
    *operands, wanted = np.array(SPECS[Op[name.upper()]].special, dtype).T
    got = WAYS[way](name, *map(np.ascontiguousarray, operands))
    np.testing.assert_array_equal(got, wanted)
    number = ~np.isnan(wanted)
    np.testing.assert_array_equal(np.signbit(got[number]), np.signbit(wanted[number]))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ADDED)
def test_backends_are_within_three_ulps(name: str, way: str, dtype: str) -> None:
    skip_without(way)
    operands = points(name, dtype, 400)
    assert worst(WAYS[way](name, *operands), operands, name, dtype) < 3
