"""The exactness of a side: its largest distance from the same rule in 50 digits, in units in the last place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rulec.language.expr.arithmetic import mpmath_context
from rulec.language.rule import Rule
from rulec.tools.compare.difference import Trial
from rulec.tools.compare.sides import Array, Hyper, ReferenceSide, Side, backend_side


@dataclass(frozen=True)
class Exactness:
    """The largest distance of each value from the oracle over all steps, in ulps of `dtype`.

    The ulp of an element is taken at its largest magnitude so far: a value near zero after a cancellation is not
    measured by its own smallness. Infinite where one side alone is not finite.
    """

    side: str
    dtype: str
    ulps: dict[str, float]


def exactness(
    rule: Rule, hyper: Hyper, trial: Trial, backend: str | None = None, advance: Callable[[], Any] = lambda: None
) -> Exactness:
    """The exactness of a backend, or of the float64 reference where `backend` is None.

    `advance` is called after each step. RuleError for a function without a 50-digit form.
    """
    return exactness_of_all(rule, hyper, trial, [backend], advance)[0]


def exactness_of_all(
    rule: Rule, hyper: Hyper, trial: Trial, backends: Sequence[str | None], advance: Callable[[], Any] = lambda: None
) -> list[Exactness]:
    """The exactness of several sides, of backends or the reference, beside one oracle: see `exactness`."""
    sides = [_side(rule, hyper, trial, backend) for backend in backends]
    oracle = ReferenceSide(rule, trial.params, hyper, "mpmath")
    ulps: list[dict[str, float]] = [{} for _ in sides]
    largest: dict[tuple[str, int], Array] = {}
    for grads, inputs in zip(trial.gradients(), trial.inputs(rule), strict=True):
        oracle.step(grads, inputs)
        exact = [{name: np.asarray(x) for name, x in each.items()} for each in oracle.values()]
        for tensor, name in ((tensor, name) for tensor, each in enumerate(exact) for name in each):
            size = np.abs(exact[tensor][name].astype(np.float64))
            largest[name, tensor] = np.fmax(largest.get((name, tensor), 0.0), size)
        for (side, dtype), known in zip(sides, ulps, strict=True):
            side.step(grads, inputs)
            for tensor, mine in enumerate(side.values()):
                for name in mine.keys() & exact[tensor].keys():
                    apart = _distance(mine[name].astype(np.float64), exact[tensor][name])
                    distance = apart / ulp(largest[name, tensor], dtype)
                    known[name] = max(known.get(name, 0.0), float(np.max(distance, initial=0.0)))
        advance()
    names = (*rule.state, "p")
    return [
        Exactness(side.name, dtype, {name: known[name] for name in names if name in known})
        for (side, dtype), known in zip(sides, ulps, strict=True)
    ]


@dataclass(frozen=True)
class Beyond:
    """A value that a backend computes farther from the oracle than rounding explains. Both numbers are ulps."""

    name: str
    distance: float
    bound: float


def beyond_bounds(measured: Exactness, reference: Exactness) -> list[Beyond]:
    """The values of a side in float64 beyond the bound of the conformance suite for whole steps.

    The bound is as many times larger as the reference's own distance is, where a rule cancels digits.
    """
    from rulec.testing.whole import TOLERANCE

    bounds = {name: TOLERANCE / EPS["float64"] * max(1.0, ulps) for name, ulps in reference.ulps.items()}
    far = {name: ulps for name, ulps in measured.ulps.items() if ulps > bounds.get(name, np.inf)}
    return [Beyond(name, ulps, bounds[name]) for name, ulps in far.items()]


def _side(rule: Rule, hyper: Hyper, trial: Trial, backend: str | None) -> tuple[Side, str]:
    """The measured side, and the dtype of its arithmetic."""
    if backend is None:
        return ReferenceSide(rule, trial.params, hyper), "float64"
    return backend_side(rule, trial.params, hyper, backend), trial.dtype


def _distance(values: Array, exact: Array) -> Array:
    """`|values - exact|`, the subtraction in 50 digits."""
    mp = mpmath_context()

    def apart(a: float, b: Any) -> float:
        finite = np.isfinite(a), bool(mp.isfinite(b))
        if not all(finite):
            return 0.0 if str(a) == str(float(b)) else np.inf
        return float(abs(mp.mpf(a) - b))

    return np.asarray(np.vectorize(apart, otypes=[float])(values, exact.reshape(values.shape)))


#: The distance from 1 to the next number, by dtype.
EPS = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
_SMALLEST_NORMAL = {"float64": 2.0**-1022, "float32": 2.0**-126, "float16": 2.0**-14, "bfloat16": 2.0**-126}


def ulp(magnitude: Array, dtype: str) -> Array:
    """The distance between neighbouring numbers of `dtype` at these magnitudes, in float64."""
    floor = np.maximum(np.where(np.isfinite(magnitude), magnitude, 0.0), _SMALLEST_NORMAL[dtype])
    _, exponent = np.frexp(floor)
    return np.asarray(np.ldexp(EPS[dtype], exponent - 1))


def largest_ulps(values: Array, expected: Array, dtype: str) -> float:
    """The largest distance, in ulps of the expected values; infinite where one side alone is not finite."""
    a, b = np.asarray(values, np.float64), np.asarray(expected, np.float64)
    with np.errstate(invalid="ignore"):
        same = (a == b) | (np.isnan(a) & np.isnan(b))
        apart = np.abs(a - b) / ulp(np.abs(b), dtype)
    return float(np.max(np.where(same, 0.0, np.where(np.isfinite(apart), apart, np.inf)), initial=0.0))
