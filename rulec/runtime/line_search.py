"""Line searches: from values and slopes along a direction, the next step to try, or the one to take.

A search is a generator that knows no array. It yields the length of a step, gets the trial of that step, and returns
the trial to take. `run` is its loop, for functions that can be called at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from typing import Any


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
