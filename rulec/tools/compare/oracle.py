"""The exactness of a side: its largest distance from the same rule in 50 digits, in units in the last place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rulec.language.expr.arithmetic import mpmath_context
from rulec.language.rule import Rule
from rulec.language.statistics import Watch
from rulec.tools.compare.difference import Trial
from rulec.tools.compare.sides import Array, Hyper, Measured, MeasuringSide, ReferenceSide, backend_side


@dataclass(frozen=True)
class Exactness:
    """The largest distance of each value from the oracle over all steps, in ulps of `dtype`.

    The ulp of an element is taken at its largest magnitude so far: a value near zero after a cancellation is not
    measured by its own smallness. Infinite where one side alone is not finite. `statistics` has the same of statistics.
    """

    side: str
    dtype: str
    ulps: dict[str, float]
    statistics: dict[str, float] = field(default_factory=dict)


def exactness(
    rule: Rule, hyper: Hyper, trial: Trial, backend: str | None = None, advance: Callable[[], Any] = lambda: None,
    watch: Watch | None = None,
) -> Exactness:  # fmt: skip
    """The exactness of a backend, or of the float64 reference where `backend` is None.

    `advance` is called after each step. `watch` are the statistics to measure: their oracle takes each step from the
    side's own parameters and states. RuleError for a function without a 50-digit form.
    """
    return exactness_of_all(rule, hyper, trial, [backend], advance, watch)[0]


def exactness_of_all(
    rule: Rule, hyper: Hyper, trial: Trial, backends: Sequence[str | None], advance: Callable[[], Any] = lambda: None,
    watch: Watch | None = None,
) -> list[Exactness]:  # fmt: skip
    """The exactness of several sides, of backends or the reference, beside one oracle: see `exactness`."""
    sides = [_side(rule, hyper, trial, backend, watch) for backend in backends]
    oracle = ReferenceSide(rule, trial.params, hyper, "mpmath")
    values, statistics = ([_Distances(dtype) for _, dtype in sides] for _ in range(2))
    # A statistic is of the step that was taken: its oracle takes each step from the parameters and states of the side.
    exact = [ReferenceSide(rule, trial.params, hyper, "mpmath", watch, stored=True) for _ in sides if watch]
    for grads, inputs in zip(trial.gradients(), trial.inputs(rule), strict=True):
        oracle.step(grads, inputs)
        wanted = _by_tensor(oracle.values())
        for place, (side, _) in enumerate(sides):
            for digits in exact[place : place + 1]:
                digits.optimizer.adopt(side.values())
                digits.step(grads, inputs)
            side.step(grads, inputs)
            values[place].add(_by_tensor(side.values()), wanted)
            for digits in exact[place : place + 1]:
                statistics[place].add(_flat(side.statistics()), _flat(digits.statistics()))
        advance()
    names = (*rule.state, "p")
    return [
        Exactness(side.name, dtype, {n: known.ulps[n] for n in names if n in known.ulps}, measured.ulps)
        for (side, dtype), known, measured in zip(sides, values, statistics, strict=True)
    ]


#: Values by name, and by tensor or place.
Named = Mapping[tuple[str, int | str], Array]


def _by_tensor(values: Sequence[Mapping[str, Array]]) -> Named:
    return {(name, i): x for i, each in enumerate(values) for name, x in each.items()}


def _flat(measured: Measured) -> Named:
    return {(name, place): x for name, by_place in measured.items() for place, x in by_place.items()}


class _Distances:
    """The largest distance of each value from the oracle over all steps, in ulps of a dtype."""

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype
        self.ulps: dict[str, float] = {}
        self._largest: dict[tuple[str, int | str], Array] = {}

    def add(self, values: Named, exact: Named) -> None:
        """Adds the values of a step; those of one side alone count for nothing."""
        for key, known in exact.items():
            size = np.abs(np.asarray(known).astype(np.float64))
            self._largest[key] = np.fmax(self._largest.get(key, 0.0), size)
        for key in (key for key in exact if key in values):
            apart = distance(np.asarray(values[key]).astype(np.float64), np.asarray(exact[key]))
            ulps = apart.reshape(-1) / ulp(self._largest[key].reshape(-1), self.dtype)
            self.ulps[key[0]] = max(self.ulps.get(key[0], 0.0), float(np.max(ulps, initial=0.0)))


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

    smallest = TOLERANCE / EPS["float64"]
    pairs = ((measured.ulps, reference.ulps), (measured.statistics, reference.statistics))
    distances = [
        Beyond(name, ulps, smallest * max(1.0, known.get(name, np.inf)))
        for mine, known in pairs
        for name, ulps in mine.items()
    ]
    return [each for each in distances if each.distance > each.bound]


def _side(
    rule: Rule, hyper: Hyper, trial: Trial, backend: str | None, watch: Watch | None
) -> tuple[MeasuringSide, str]:  # fmt: skip
    """The measured side, and the dtype of its arithmetic."""
    if backend is None:
        return ReferenceSide(rule, trial.params, hyper, watch=watch), "float64"
    return backend_side(rule, trial.params, hyper, backend, watch), trial.dtype


def distance(values: Array, exact: Array) -> Array:
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
