"""The L-BFGS method on vectors: directions from the last changes, a step along each, and when to stop.

The direction is that of the rule `lbfgs_direction`, without pairs that have no curvature. The rule has a
kernel for each length of its history; this loop goes over any number of pairs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from rulec.errors import HyperError, StateMismatch
from rulec.runtime.line_search import Backtracking, Limits, Search, Trial, Zoom, floats, run, strong_wolfe


def _backtracking(start: Trial, step: float, limits: Limits) -> Search:
    search = Backtracking(
        max(0, limits.trials - 1), decrease_factor=0.5, increase_factor=1.0, max_learning_rate=math.inf
    )
    return floats(search, start, step)


def _zoom(start: Trial, step: float, limits: Limits) -> Search:
    return floats(Zoom(limits.trials), start, step)


#: The searches by name.
SEARCHES: Mapping[str, Callable[[Trial, float, Limits], Search]] = {
    "strong_wolfe": strong_wolfe,
    "backtracking": _backtracking,
    "zoom": _zoom,
}

#: A pair of changes with less curvature than this is left out.
_LEAST_CURVATURE = 1e-10

#: The lists of a `Progress`.
_PAIRS = ("gradient_changes", "changes", "weights")


class Space(Protocol):
    """The parameters, whose changes and gradients are vectors of one array library."""

    def evaluate(self) -> tuple[Any, Any]:
        """The loss where the parameters are, and its gradient, a new vector."""

    def move(self, step: float, direction: Any) -> None:
        """Adds a step along a direction to the parameters."""

    def copies(self) -> Any:
        """Copies of the parameters, for `put_back`."""

    def put_back(self, copies: Any) -> None:
        """Gives the parameters the values that they had, bit for bit."""

    def add(self, vector: Any, scale: Any, other: Any) -> None:
        """Adds a multiple of another vector to a vector, in place."""


@dataclass(frozen=True)
class Settings:
    """The numbers of a step of L-BFGS, under torch's names. HyperError for values that mean nothing."""

    lr: float = 1.0
    max_iter: int = 20
    max_eval: int | None = None
    tolerance_grad: float = 1e-7
    tolerance_change: float = 1e-9
    history_size: int = 100
    line_search_fn: str | None = None

    def __post_init__(self) -> None:
        for name in ("lr", "tolerance_grad", "tolerance_change"):
            value = getattr(self, name)
            if isinstance(value, bool | str) or not _number(value) >= 0 or math.isinf(_number(value)):
                raise HyperError(f"LBFGS has {name}={value!r}: give a number, 0 or larger")
        for name in ("max_iter", "max_eval", "history_size"):
            value = getattr(self, name)
            if name == "max_eval" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise HyperError(f"LBFGS has {name}={value!r}: give a whole number, 1 or larger")
        if self.line_search_fn is not None and self.line_search_fn not in SEARCHES:
            names = ", ".join(map(repr, SEARCHES))
            raise HyperError(f"LBFGS has line_search_fn={self.line_search_fn!r}: give None or one of {names}")

    @property
    def evaluations(self) -> int:
        """The number of evaluations after which a step ends."""
        return max(1, self.max_iter * 5 // 4) if self.max_eval is None else self.max_eval


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        return math.nan


@dataclass
class Progress:
    """The memory of L-BFGS: the last direction, step, gradient and loss, and the pairs of changes, oldest first.

    `gradient_changes`, `changes` and `weights` are y, s and 1/(y's) of the pairs; `scale` is s'y/y'y of the last one.
    """

    evaluations: int = 0
    iterations: int = 0
    direction: Any = None
    step: float = 0.0
    gradient_changes: list[Any] = field(default_factory=list)
    changes: list[Any] = field(default_factory=list)
    weights: list[Any] = field(default_factory=list)
    scale: Any = 1
    gradient: Any = None
    loss: float = math.nan

    def copy(self) -> Progress:
        """A copy with lists of its own; vectors are never changed."""
        gradient_changes, changes, weights = ([*getattr(self, name)] for name in _PAIRS)
        return replace(self, gradient_changes=gradient_changes, changes=changes, weights=weights)

    @classmethod
    def of(cls, saved: Mapping[str, Any], called: Mapping[str, str], copied: Callable[[Any, str], Any]) -> Progress:
        """The progress in a saved state, where `called` has its name for each field; `copied` checks a vector.

        StateMismatch where something is missing.
        """
        counts = [called[name] for name in ("evaluations", "iterations")]
        if not all(isinstance(saved.get(key), int) for key in counts):
            raise StateMismatch("the saved state is not of LBFGS: give what state_dict() of an LBFGS returned")
        if not saved[counts[1]]:
            return cls(saved[counts[0]])
        for key in called.values():
            if key not in saved:
                raise StateMismatch(f"the saved state of LBFGS lacks {key}: give all that state_dict() returned")
        lists = [called[name] for name in _PAIRS]
        if len({len(saved[key]) for key in lists}) != 1:
            raise StateMismatch(f"the saved state of LBFGS has lists of different lengths: {', '.join(lists)}")
        values: dict[str, Any] = {name: copied(saved[key], key) for name, key in called.items() if name not in _PAIRS}
        values |= {name: [copied(each, called[name]) for each in saved[called[name]]] for name in _PAIRS}
        return cls(**values)

    def turn(self, gradient: Any, loss: float, memory: int, add: Callable[[Any, Any, Any], None]) -> None:
        """Goes on to another gradient and loss: takes in the last change, and finds the next direction."""
        self.iterations += 1
        if self.iterations == 1:
            self.direction = -gradient
        else:
            self._learn(gradient - self.gradient, self.direction * self.step, memory)
            self.direction = self._product(-gradient, add)
        self.gradient, self.loss = gradient, loss

    def _learn(self, y: Any, s: Any, memory: int) -> None:
        curvature = y @ s
        if curvature > _LEAST_CURVATURE:
            self.gradient_changes.append(y)
            self.changes.append(s)
            self.weights.append(1.0 / curvature)
            self.scale = curvature / (y @ y)
        for name in _PAIRS:
            del getattr(self, name)[:-memory]

    def _product(self, vector: Any, add: Callable[[Any, Any, Any], None]) -> Any:
        """A vector times the estimate of the inverse Hessian, by the loops of Nocedal; the vector is used up."""
        pairs = [*zip(self.gradient_changes, self.changes, self.weights, strict=True)]
        shares = []
        for y, s, weight in reversed(pairs):
            shares.append((s @ vector) * weight)
            add(vector, -shares[-1], y)
        product = vector * self.scale
        for y, s, weight in pairs:
            add(product, shares.pop() - (y @ product) * weight, s)
        return product


def descend(space: Space, before: Progress, settings: Settings) -> tuple[Any, Progress]:
    """The loss before a step of several iterations, and the progress after it. The parameters are moved."""
    now = before.copy()
    first, gradient = space.evaluate()
    loss, used = float(first), 1
    end = now.iterations + settings.max_iter
    flat = _largest(gradient) <= settings.tolerance_grad
    while not flat:
        now.turn(gradient, loss, settings.history_size, space.add)
        now.step = settings.lr
        if now.iterations == 1:
            now.step *= min(1.0, float(1.0 / abs(gradient).sum()))
        start = Trial(0.0, loss, float(gradient @ now.direction), gradient)
        if start.slope > -settings.tolerance_change:
            break
        trial, count = _advance(space, start, now, settings, used, now.iterations == end)
        used, now.step, loss, gradient = used + count, trial.step, trial.value, trial.gradient
        if now.iterations == end or used >= settings.evaluations:
            break
        flat = _largest(gradient) <= settings.tolerance_grad
        flat |= _largest(now.direction * now.step) <= settings.tolerance_change
        flat |= abs(loss - now.loss) < settings.tolerance_change
    now.evaluations += used
    return first, now


def _largest(vector: Any) -> float:
    return float(abs(vector).max())


def _advance(space: Space, start: Trial, now: Progress, settings: Settings, used: int, last: bool) -> tuple[Trial, int]:
    """Moves the parameters along the direction; the trial where they are, and the number of evaluations.

    Without a search the last step is not evaluated: its trial is the start with its step.
    """
    if settings.line_search_fn is None:
        space.move(now.step, now.direction)
        if last:
            return replace(start, step=now.step), 0
        loss, gradient = space.evaluate()
        return Trial(now.step, float(loss), math.nan, gradient), 1

    here = space.copies()

    def at(step: float) -> Trial:
        space.move(step, now.direction)
        loss, gradient = space.evaluate()
        space.put_back(here)
        return Trial(step, float(loss), float(gradient @ now.direction), gradient)

    limits = Limits(settings.evaluations - used, _largest(now.direction), settings.tolerance_change)
    trial, count = run(SEARCHES[settings.line_search_fn](start, now.step, limits), at)
    space.move(trial.step, now.direction)
    return trial, count
