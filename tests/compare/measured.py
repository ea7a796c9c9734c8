"""Statistics of steps beside 50 digits, within the bounds of the conformance suite's machines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

import rulec
from rulec.array.arrays import numpy_dtype
from rulec.backend.protocol import Backend
from rulec.compiler.reference import ReferenceOptimizer
from rulec.language.expr.arithmetic import mpmath_context
from rulec.language.rule import Rule
from rulec.language.statistics import NORMS
from rulec.runtime.statistics import checked_words, of_rule
from rulec.testing.cases import hyper_values
from rulec.testing.interval import Range
from rulec.testing.kinds import IEEE, Numerics
from rulec.testing.measured import statistic_ranges
from rulec.tools.compare.sides import EngineSide, JaxSide, Measured

Array = np.ndarray[Any, Any]

#: One number, nothing, a line, odd matrices, a batch, and two alike.
SHAPES = ((), (1,), (0,), (7,), (5, 3), (3, 5), (2, 3, 5), (7,))

#: Statistics at each level, with each reduction, choices, counts and quotients.
EXPRESSIONS: Mapping[str, str] = {
    **NORMS,
    "dot": "sum(update*grad)",
    "moment": "mean(p*p*g)",
    "largest": "max(abs(update))",
    "least": "min(g)",
    "agree": "mean(where(g*p > 0, 1, 0))",
    "few": "count_nonzero(where(abs(g) > rms(g), g, 0))",
    "rows": 'norm(update, per="row")',
    "row_ratio": 'norm(update, per="row")/norm(p, per="row")',
    "columns": 'mean(g, per="col")',
    "least_column": 'min(where(p > 0, g, p), per="col")',
    "group": 'norm(grad, per="group")',
    "group_mean": 'mean(update, per="group")',
    "model": 'norm(grad, per="model")',
    "model_top": 'max(abs(update), per="model")',
    "share": 'norm(grad)/norm(grad, per="model")',
    "spread": "rms(g - mean(g))",
    "count": 't + sum(where(isfinite(g), 0, 1), per="model")',
}

#: A side, made of a rule, its parameters, hyper-parameters, statistics and the numbers of groups.
Start = Callable[..., Any]


@dataclass(frozen=True)
class Numbers:
    """Parameters and gradients of a dtype: of ordinary size, `unequal` over 35 decades, or `special` with infinity.

    The first gradients of the tensors in `faulty` have a NaN.
    """

    dtype: str
    shapes: Sequence[tuple[int, ...]] = SHAPES
    kind: str = ""
    seed: int = 0
    faulty: Sequence[int] = ()

    def drawn(self, step: int) -> list[Array]:
        """The gradients of a step from 1, or the parameters at 0."""
        random = np.random.default_rng((self.seed, step))
        drawn = [self._of(random, shape, step) for shape in self.shapes]
        for i in self.faulty if step == 1 else ():
            drawn[i].reshape(-1)[:1] = np.nan
        return [x.astype(numpy_dtype(self.dtype)) for x in drawn]

    def _of(self, random: np.random.Generator, shape: tuple[int, ...], step: int) -> Array:
        numbers = np.asarray(random.standard_normal(shape))
        if self.kind == "unequal":
            numbers = np.asarray(np.sign(numbers) * 10.0 ** random.uniform(-20, 15, shape))
        if self.kind == "special" and step:
            numbers.reshape(-1)[::5], numbers.reshape(-1)[1::7] = np.nan, np.inf
        return numbers


def engine(backend: str | Backend) -> Start:
    """Sides of a backend by the runtime."""

    def start(rule: Rule, params: Sequence[Array], hyper: Any, watch: Any, groups: Any) -> EngineSide:
        return EngineSide(rule, params, hyper, backend, watch, groups)

    return start


def jax(rule: Rule, params: Sequence[Array], hyper: Any, watch: Any, groups: Any) -> JaxSide:
    """A side of the jax backend, of one group."""
    return JaxSide(rule, params, hyper, watch)


@dataclass
class Oracle:
    """A rule in 50 digits, and with ranges, over some numbers."""

    rule: Rule
    numbers: Numbers
    watch: Any
    groups: Sequence[int] | None = None
    numerics: Numerics = IEEE
    hyper: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        count = max(self.groups or [0]) + 1
        words = checked_words(self.rule.name, self.watch)
        self.exact, self.plain = (
            ReferenceOptimizer(
                self.rule, self.numbers.drawn(0), [dict(self.hyper)] * count, arithmetic, groups=self.groups,
                watch=lambda routed: of_rule(cast(Rule, routed), words),
            )
            for arithmetic in ("mpmath", "float64")
        )  # fmt: skip

    def step(self, values: Sequence[Mapping[str, Array]], grads: Sequence[Array], inputs: Any = None) -> Bounded:
        """The statistics of a step from these parameters and states, and their bounds."""
        wide = [g.astype(np.float64) for g in grads]
        for optimizer in (self.exact, self.plain):
            optimizer.adopt(values)
        ranges = statistic_ranges(self.plain, wide, self.numbers.dtype, self.numerics, inputs)
        with np.errstate(all="ignore"):
            for optimizer in (self.exact, self.plain):
                optimizer.step(wide, inputs=inputs)
        return Bounded(self.exact.statistics, ranges)


@dataclass(frozen=True)
class Bounded:
    """Statistics in 50 digits, and their bounds."""

    exact: Measured
    ranges: Mapping[str, Mapping[str, Range]]

    def check(self, measured: Measured) -> None:
        """AssertionError where a statistic is beyond its bounds, is missing, or was not asked for."""
        assert measured.keys() == self.ranges.keys() >= self.exact.keys()
        for name, by_place in self.ranges.items():
            assert measured[name].keys() == by_place.keys(), name
            for place, allowed in by_place.items():
                if place not in self.exact.get(name, {}):
                    assert np.isnan(measured[name][place]).all(), f"{name} of {place}, which skipped the step"
                    continue
                exact = np.ravel(self.exact[name][place])
                assert inside(exact, allowed).all(), f"the bounds of {name} of {place} leave out 50 digits"
                mine = np.ravel(measured[name][place])
                assert mine.shape == exact.shape, (name, place)
                for at in np.flatnonzero(~inside(mine, allowed))[:1]:
                    limits = np.ravel(allowed.low)[at], np.ravel(allowed.high)[at]
                    raise AssertionError(
                        f"{name} of {place} is {mine[at]!r}, in 50 digits {float(exact[at])!r}: {limits}"
                    )

    def widths(self) -> Iterator[tuple[str, float]]:
        """The width of each bound, in parts of the value, where that is a number and not zero."""
        for name, by_place in self.ranges.items():
            for place, r in by_place.items():
                exact = np.abs(np.ravel(self.exact[name][place]).astype(np.float64))
                with np.errstate(all="ignore"):
                    width = (np.ravel(r.high) - np.ravel(r.low)) / exact
                yield name, float(np.max(width, initial=0.0, where=np.isfinite(exact) & (exact > 0)))


def inside(values: Array, allowed: Range) -> Array:
    """Whether numbers, of float64 or of 50 digits, are in a range."""
    mp = mpmath_context()

    def held(x: Any, low: float, high: float, nan: bool) -> bool:
        return bool(nan) if mp.isnan(x) else bool(low <= x <= high)

    ends = (np.ravel(np.broadcast_to(end, allowed.low.shape)) for end in (allowed.low, allowed.high, allowed.nan))
    return np.array([held(*each) for each in zip(values, *ends, strict=True)], bool)


def check(start: Start, oracle: Oracle, steps: int = 2) -> None:
    """AssertionError where a side's statistics of any step are beyond their bounds."""
    side = start(oracle.rule, oracle.numbers.drawn(0), dict(oracle.hyper), oracle.watch, oracle.groups)
    for step in range(1, steps + 1):
        grads = oracle.numbers.drawn(step)
        bounded = oracle.step(side.values(), grads)
        with np.errstate(all="ignore"):
            side.step(grads)
        bounded.check(side.statistics())


def of_library(name: str) -> Oracle:
    """The statistics that a rule of the library declares, and the norms, over a matrix and a vector."""
    rule = rulec.load(name)
    rule = rule(*map(rulec.load, ("adam", "sgd")[: len(rule.wraps)])) if rule.wraps else rule
    return Oracle(rule, Numbers("float32", ((4, 6), (5,))), ["norms", *rule.statistics], hyper=hyper_values(rule, 1)[0])
