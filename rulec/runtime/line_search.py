"""Line searches: from values and slopes along a direction they choose the next step to try, or the one to take.

A search is a generator that knows no array. It yields the length of a step, gets the trial of that step, and returns
the trial to take. `run` is its loop, for functions that can be called at once.

`Backtracking` and `Zoom` are searches of optax, as pure functions of numbers that JAX may trace: they return the next
step, and the state after its trial. `xp` is NumPy or `jax.numpy`. `floats` makes a search of Python numbers from
either.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np


@dataclass(frozen=True)
class Trial:
    """A function along a direction, after a step: its value, and its slope for each unit of the step.

    `gradient` is the gradient there, for whoever asked; a search does not look at it.
    """

    step: float
    value: float
    slope: float
    gradient: Any = None


Search = Generator[float, Trial, Trial]


@dataclass(frozen=True)
class Limits:
    """When a search stops: after `trials`, or where its bracket is shorter than `tolerance` in every parameter.

    `length` is the largest change of a parameter in a step of 1.
    """

    trials: int
    length: float
    tolerance: float


def run(search: Search, at: Callable[[float], Trial]) -> tuple[Trial, int]:
    """The trial that a search takes, and the number of trials; `at` makes the trial of a step."""
    count = 0
    try:
        step = next(search)
        while True:
            count += 1
            step = search.send(_comparable(at(step)))
    except StopIteration as end:
        trial: Trial = end.value
        return trial, count


def _comparable(trial: Trial) -> Trial:
    """A trial where the function is not finite is as high as can be."""
    return trial if math.isfinite(trial.value) and math.isfinite(trial.slope) else replace(trial, value=math.inf)


#: A step is long enough short of this part of the decrease that the slope promises (Armijo), and where the slope has
#: shrunk to this part (Wolfe).
_DECREASE, _CURVATURE = 1e-4, 0.9


def _decreased(start: Trial, trial: Trial) -> bool:
    """Armijo's condition: the value is lower by a part of what the first slope promises."""
    return trial.value <= start.value + _DECREASE * trial.step * start.slope


def _flat(start: Trial, trial: Trial) -> bool:
    """The strong condition of Wolfe: the slope is small beside the first."""
    return abs(trial.slope) <= -_CURVATURE * start.slope


def strong_wolfe(start: Trial, step: float, limits: Limits) -> Search:
    """A step with the strong Wolfe conditions: a bracket of such steps, made smaller by cubic interpolation.

    It makes one trial more than `limits.trials` at most. Algorithms 3.5 and 3.6 of Nocedal and Wright, with the bounds
    and the interpolation of Schmidt's minFunc.
    """
    before, trial, count = start, (yield step), 0
    while count < limits.trials:
        if not _decreased(start, trial) or (count > 1 and trial.value >= before.value):
            return (yield from _zoom(start, [before, trial], count, limits))
        if _flat(start, trial):
            return trial
        if trial.slope >= 0:
            return (yield from _zoom(start, [before, trial], count, limits))
        step = trial.step
        step = _lowest(before, trial, step + 0.01 * (step - before.step), step * 10)
        before, trial, count = trial, (yield step), count + 1
    return trial if trial.value < start.value else start


def _zoom(start: Trial, ends: list[Trial], count: int, limits: Limits) -> Search:
    """The step with the conditions between two ends, or the better end where none is found."""
    low, near = _lower(ends), False
    while count < limits.trials and not abs(ends[1].step - ends[0].step) * limits.length < limits.tolerance:
        left, right = sorted(end.step for end in ends)
        step, near = _inside(_lowest(ends[0], ends[1], left, right), left, right, near)
        trial, count = (yield step), count + 1
        if not _decreased(start, trial) or not trial.value < ends[low].value:
            ends[1 - low] = trial
            low = _lower(ends)
            continue
        if _flat(start, trial):
            return trial
        if trial.slope * (ends[1 - low].step - ends[low].step) >= 0:
            ends[1 - low] = ends[low]
        ends[low] = trial
    return ends[low]


def _lower(ends: list[Trial]) -> int:
    return int(ends[1].value < ends[0].value)


def _inside(step: float, left: float, right: float, near: bool) -> tuple[float, bool]:
    """A step, kept from the ends of its bracket where it is near to one for the second time; whether it is near now."""
    margin = 0.1 * (right - left)
    if min(right - step, step - left) >= margin:
        return step, False
    if not near and left < step < right:
        return step, True
    return (right - margin if abs(step - right) < abs(step - left) else left + margin), False


def _lowest(a: Trial, b: Trial, least: float, most: float) -> float:
    """The step where the cubic through two trials is lowest, within bounds; their middle where there is none."""
    left, right = (a, b) if a.step <= b.step else (b, a)
    bend = a.slope + b.slope - 3 * _over(a.value - b.value, a.step - b.step)
    square = bend * bend - a.slope * b.slope
    if square >= 0:
        root, width = math.sqrt(square), right.step - left.step
        part = _over(right.slope + root - bend, right.slope - left.slope + 2 * root)
        step = min(max(right.step - width * part, least), most)
        if not math.isnan(step):
            return step
    return (least + most) / 2


def _over(a: float, b: float) -> float:
    """A quotient as in the arithmetic of arrays, where one by 0 is infinite or no number."""
    if b:
        return a / b
    return math.copysign(math.inf, a) * math.copysign(1, b) if a else math.nan


_State = TypeVar("_State")


class Point(NamedTuple):
    """A function along a direction, after a step: its value, and its slope for each unit of the step."""

    step: Any
    value: Any
    slope: Any


def _pick(xp: Any, condition: Any, yes: Point, no: Point) -> Point:
    return Point(*(xp.where(condition, a, b) for a, b in zip(yes, no, strict=True)))


def _violation(xp: Any, excess: Any) -> Any:
    """By how much a condition is missed: 0 where it holds, infinite where that is no number."""
    return xp.where(xp.isnan(excess), np.inf, xp.maximum(excess, 0.0))


class PureSearch(Protocol[_State]):
    """A search as functions of its state, which is a tuple of numbers."""

    def begin(self, xp: Any, start: Point, guess: Any) -> _State:
        """The state before the first trial; `guess` is a step to begin with."""

    def going(self, state: _State) -> Any:
        """Whether there is another trial."""

    def candidate(self, xp: Any, state: _State) -> Any:
        """The step of the next trial."""

    def advance(self, xp: Any, start: Point, state: _State, trial: Point) -> tuple[_State, Any]:
        """The state after a trial, and whether to keep this trial in case the search fails."""

    def failed(self, state: _State) -> Any:
        """Whether the last trial is not the one to take."""


class BacktrackingState(NamedTuple):
    """Of the last trial: its number, its step, and how far it misses the condition."""

    count: Any
    step: Any
    value: Any
    error: Any


@dataclass(frozen=True)
class Backtracking:
    """Shortens a step until the value is low enough (Armijo), in `most` + 1 trials at most."""

    most: Any
    slope_rtol: Any = 1e-4
    decrease_factor: Any = 0.8
    increase_factor: Any = 1.5
    max_learning_rate: Any = 1.0
    atol: Any = 0.0
    rtol: Any = 0.0

    def begin(self, xp: Any, start: Point, guess: Any) -> BacktrackingState:
        step = xp.minimum(self.increase_factor * guess, self.max_learning_rate)
        return BacktrackingState(0, step, start.value, step * 0 + np.inf)

    def going(self, state: BacktrackingState) -> Any:
        return self.failed(state) & (state.count <= self.most)

    def candidate(self, xp: Any, state: BacktrackingState) -> Any:
        return xp.where(state.count > 0, self.decrease_factor * state.step, state.step)

    def advance(self, xp: Any, start: Point, state: BacktrackingState, trial: Point) -> tuple[BacktrackingState, Any]:
        excess = trial.value - (1.0 + self.rtol) * start.value - trial.step * self.slope_rtol * start.slope
        new = BacktrackingState(state.count + 1, trial.step, trial.value, _violation(xp, excess))
        return new, new.error <= self.atol

    def failed(self, state: BacktrackingState) -> Any:
        return ~(state.error <= self.atol)


class ZoomState(NamedTuple):
    """The last trial, how far it misses both conditions, and the interval.

    The value at `low` is at most that at `high`, whichever is longer. The cubic goes through `reference` too. `safe` is
    a trial with decrease, though the slope is not small there.
    """

    count: Any
    guess: Any
    last: Point
    decrease_error: Any
    curvature_error: Any
    bracketed: Any
    done: Any
    given_up: Any
    low: Point
    high: Point
    reference: Point
    safe: Point


@dataclass(frozen=True)
class Zoom:
    """Enlarges a step until an interval has steps with Wolfe's conditions, and looks for one inside.

    Algorithms 3.5 and 3.6 of Nocedal and Wright, with the decrease near a minimum of Hager and Zhang.
    """

    most: Any
    max_learning_rate: Any = None
    tol: Any = 0.0
    increase_factor: Any = 2.0
    slope_rtol: Any = 1e-4
    curv_rtol: Any = 0.9
    approx_dec_rtol: Any = 1e-6
    stepsize_precision: Any = 1e-5

    def begin(self, xp: Any, start: Point, guess: Any) -> ZoomState:
        inf, no = start.value * 0 + np.inf, xp.asarray(False)
        return ZoomState(0, guess, start, inf, inf, no, no, no, start, start, start, start)

    def going(self, state: ZoomState) -> Any:
        return ~(state.done | state.given_up)

    def failed(self, state: ZoomState) -> Any:
        return state.given_up

    def candidate(self, xp: Any, state: ZoomState) -> Any:
        longer = self._longer(xp, state)
        if self.max_learning_rate is not None:
            longer = xp.minimum(longer, self.max_learning_rate)
        return xp.where(state.bracketed, _interpolated(xp, state.low, state.high, state.reference), longer)

    def _longer(self, xp: Any, state: ZoomState) -> Any:
        return xp.where(state.count == 0, state.guess, self.increase_factor * state.last.step)

    def advance(self, xp: Any, start: Point, state: ZoomState, trial: Point) -> tuple[ZoomState, Any]:
        decrease_error = self._decrease_error(xp, start, trial)
        curvature_error = _violation(xp, abs(trial.slope) - self.curv_rtol * abs(start.slope))
        good = xp.maximum(decrease_error, curvature_error) <= self.tol
        keep = (decrease_error <= self.tol) & (~state.bracketed | (trial.value < state.safe.value))
        state = state._replace(
            count=state.count + 1, decrease_error=decrease_error, curvature_error=curvature_error,
            safe=_pick(xp, keep, trial, state.safe),
        )  # fmt: skip
        wide, close = self._widened(xp, state, trial, good), self._narrowed(xp, state, trial, good)
        flags = {
            name: xp.where(state.bracketed, getattr(close, name), getattr(wide, name))
            for name in ("bracketed", "done", "given_up")
        }
        points = {
            name: _pick(xp, state.bracketed, getattr(close, name), getattr(wide, name))
            for name in ("low", "high", "reference")
        }
        return state._replace(last=trial, **flags, **points), keep

    def _decrease_error(self, xp: Any, start: Point, trial: Point) -> Any:
        excess = trial.value - start.value - self.slope_rtol * trial.step * start.slope
        if self.approx_dec_rtol is not None:
            slope = trial.slope - (2 * self.slope_rtol - 1.0) * start.slope
            near = trial.value - start.value - self.approx_dec_rtol * abs(start.value)
            excess = xp.minimum(xp.maximum(slope, near), excess)
        return _violation(xp, excess)

    def _widened(self, xp: Any, state: ZoomState, trial: Point, good: Any) -> ZoomState:
        """The state after a trial in search of an interval."""
        before = state.last
        above = (state.decrease_error > 0.0) | ((trial.value >= before.value) & (state.count > 1))
        rising = (trial.slope >= 0.0) & ~above
        low, high = _pick(xp, rising, trial, before), _pick(xp, rising, before, trial)
        bracketed = above | rising | good
        longest = False
        if self.max_learning_rate is not None:
            first = state._replace(count=state.count - 1)
            longest = self._longer(xp, first) >= self.max_learning_rate
        done = good | (longest & ~bracketed)
        given_up = (state.count >= self.most) & ~done
        return state._replace(bracketed=bracketed, done=done, given_up=given_up, low=low, high=high, reference=low)

    def _narrowed(self, xp: Any, state: ZoomState, trial: Point, good: Any) -> ZoomState:
        """The state after a trial inside of the interval."""
        low, high = state.low, state.high
        above = (state.decrease_error > 0.0) | (trial.value >= low.value)
        turned = (trial.slope * (high.step - low.step) >= 0.0) & ~above
        short = abs(high.step - low.step) <= self.stepsize_precision
        given_up = ((state.count >= self.most) | (short & (state.safe.step > 0.0))) & ~good
        return state._replace(
            done=good, given_up=given_up,
            low=_pick(xp, ~above, trial, low), high=_pick(xp, turned, low, _pick(xp, above, trial, high)),
            reference=_pick(xp, above | turned, high, low),
        )  # fmt: skip


def _interpolated(xp: Any, low: Point, high: Point, reference: Point) -> Any:
    """A step in an interval: where a cubic is lowest, a parabola, or the middle, the first that keeps from the ends."""
    width = abs(high.step - low.step)
    left, right = xp.minimum(high.step, low.step), xp.maximum(high.step, low.step)
    cubic, parabola = _cubic(xp, low, high, reference), _parabola(low, high)
    step = xp.where(
        (parabola > left + 0.1 * width) & (parabola < right - 0.1 * width), parabola, (low.step + high.step) / 2.0
    )
    return xp.where((cubic > left + 0.2 * width) & (cubic < right - 0.2 * width), cubic, step)


def _cubic(xp: Any, a: Point, b: Point, c: Point) -> Any:
    """The minimum of the cubic through three points, with the slope at the first; NaN where it has none."""
    to_b, to_c = b.step - a.step, c.step - a.step
    rise_b, rise_c = b.value - a.value - a.slope * to_b, c.value - a.value - a.slope * to_c
    whole = (to_b * to_c) ** 2 * (to_b - to_c)
    third = (to_c**2 * rise_b - to_b**2 * rise_c) / whole
    second = (to_b**3 * rise_c - to_c**3 * rise_b) / whole
    return a.step + (-second + xp.sqrt(second * second - 3.0 * third * a.slope)) / (3.0 * third)


def _parabola(a: Point, b: Point) -> Any:
    """The minimum of the parabola through two points, with the slope at the first."""
    width = b.step - a.step
    return a.step - a.slope / (2.0 * ((b.value - a.value - a.slope * width) / width**2))


def floats(search: PureSearch[Any], start: Trial, guess: float) -> Search:
    """The search of numbers: it ends at the last trial, or at the one that was kept."""
    origin = Point(*map(np.float64, (start.step, start.value, start.slope)))
    state, kept, last = search.begin(np, origin, np.float64(guess)), start, start
    while search.going(state):
        with np.errstate(all="ignore"):
            step = float(search.candidate(np, state))
        last = yield step
        point = Point(*map(np.float64, (step, last.value, last.slope)))
        with np.errstate(all="ignore"):
            state, keep = search.advance(np, origin, state, point)
        kept = last if keep else kept
    return kept if search.failed(state) else last
