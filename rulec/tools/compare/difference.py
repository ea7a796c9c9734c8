"""The differences between two sides of a comparison, and the first value that differs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rulec.errors import RulecError
from rulec.language.expr.text import expression_text
from rulec.language.rule import Rule, assignments
from rulec.tools.compare.sides import Array, Side
from rulec.tools.compare.trial import Trial

Values = Sequence[Mapping[str, Array]]

#: Differences that rounding alone makes, in parts of a tensor's largest magnitude so far, by dtype.
TOLERANCE = {"float64": 1e-12, "float32": 4 * 2.0**-23}


@dataclass(frozen=True)
class Parting:
    """The first value that differs by more than the tolerance: its step, name, tensor and element."""

    step: int
    value: str
    tensor: int
    element: tuple[int, ...]
    ours: float
    theirs: float


@dataclass
class Differences:
    """The largest difference of each value over all steps, relative to its tensor's largest magnitude so far."""

    largest: dict[str, float] = field(default_factory=dict)
    first: Parting | None = None

    @property
    def maximum(self) -> float:
        """The largest of all."""
        return max(self.largest.values(), default=0.0)

    def add(
        self, step: int, name: str, tensor: int, values: tuple[Array, Array], scale: float, tolerance: float
    ) -> None:
        """Adds one value of a step, ours and theirs; RulecError where the two differ in size."""
        a, b = (np.asarray(v, np.float64) for v in values)
        if a.size != b.size:
            raise RulecError(f"{name} has shape {a.shape} on one side and {b.shape} on the other: name other states")
        b = b.reshape(a.shape)
        relative = _relative(a, b, scale)
        worst = float(np.max(relative, initial=0.0))
        self.largest[name] = max(self.largest.get(name, 0.0), worst)
        if worst > tolerance and self.first is None:
            at = np.unravel_index(int(np.argmax(relative > tolerance)), relative.shape)
            element = tuple(int(i) for i in at)
            self.first = Parting(step, name, tensor, element, float(a[at]), float(b[at]))


def order_of_values(rule: Rule) -> list[str]:
    """States in the order of their lines, then `p`: the first to differ in a step is nearest to the cause."""
    targets = [line.target for line in assignments(rule.step) if line.target in rule.state]
    return [*dict.fromkeys([*targets, *rule.state]), "p"]


def line_of(rule: Rule, value: str) -> str:
    """The last line of a rule's step that assigns a value, with its file and line if known."""
    lines = [line for line in assignments(rule.step) if line.target == value]
    if not lines:
        return ""
    span = lines[-1].span
    # The file's name is enough: the folder of the library differs from one installation to the next.
    place = f" ({Path(span.source.name).name}:{span.line})" if span else ""
    return f"{value} = {expression_text(lines[-1].value)}{place}"


def compare(
    ours: Side, theirs: Side, trial: Trial, order: Sequence[str], tolerance: float, names: Mapping[str, str],
    advance: Callable[[], Any] = lambda: None,
) -> Differences:  # fmt: skip
    """Steps both sides through a trial; `advance` is called after each step.

    `names` is state of ours -> their name for it. Any other state of ours is matched with the first state of theirs
    with the same values after a step, and left out of the comparison until there is one.
    """
    differences = Differences()
    matched = {"p": "p", **names}
    scale: dict[tuple[str, int], float] = {}
    for step, grads in enumerate(trial.gradients(), 1):
        ours.step(grads)
        theirs.step([g.copy() for g in grads])
        here, there = ours.values(), theirs.values()
        matched |= _match([n for n in order if n not in matched], here, there, matched.values(), tolerance)
        for tensor, (a, b) in enumerate(zip(here, there, strict=True)):
            for name in order:
                if name in a and matched.get(name) in b:
                    value, other, key = a[name], b[matched[name]], (name, tensor)
                    scale[key] = max(scale.get(key, 0.0), _magnitude(other))
                    differences.add(step, name, tensor, (value, other), scale[key], tolerance)
        advance()
    return differences


def _match(
    names: Sequence[str], ours: Values, theirs: Values, taken: Iterable[str], tolerance: float
) -> dict[str, str]:
    """State of ours -> state of theirs with the same values, not all zero, in every tensor."""
    matches: dict[str, str] = {}
    for name in names:
        for other in [k for k in theirs[0] if k not in {*taken, *matches.values()}]:
            pairs = [(a[name], b[other]) for a, b in zip(ours, theirs, strict=True) if name in a and other in b]
            if len(pairs) == len(ours) and all(_equal(a, b, tolerance) for a, b in pairs):
                matches[name] = other
                break
    return matches


def _equal(a: Array, b: Array, tolerance: float) -> bool:
    scale = _magnitude(b)
    return scale > 0 and a.shape == b.shape and float(np.max(_relative(a, b, scale), initial=0.0)) <= tolerance


def _relative(a: Array, b: Array, scale: float) -> Array:
    """Differences in parts of `scale`: none where both are NaN or the same infinity, infinite where one alone is."""
    with np.errstate(invalid="ignore"):
        same = (a == b) | (np.isnan(a) & np.isnan(b))
        apart = np.abs(a - b) / (scale or 1.0)
    return np.where(same, 0.0, np.where(np.isfinite(apart), apart, np.inf))


def _magnitude(values: Array) -> float:
    finite = np.abs(np.asarray(values, np.float64))
    return float(np.max(finite, initial=0.0, where=np.isfinite(finite)))
