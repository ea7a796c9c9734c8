"""Where two sides of a comparison part, and how far."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rulec.compare.sides import Array, Side
from rulec.compare.trial import Trial
from rulec.errors import RulecError
from rulec.language.rule import Rule, assignments
from rulec.language.text import expression_text

Values = Sequence[Mapping[str, Array]]

#: Differences that rounding alone makes, in parts of a tensor's largest magnitude so far, by dtype.
TOLERANCE = {"float64": 1e-12, "float32": 4 * 2.0**-23}


@dataclass(frozen=True)
class Parting:
    """The first value that differs by more than the tolerance: at which step, which value, tensor and element."""

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


def order_of_values(rule: Rule) -> list[str]:
    """States in the order their lines stand, then `p`: the first to part in a step is nearest the cause."""
    targets = [line.target for line in assignments(rule.step) if line.target in rule.state]
    return [*dict.fromkeys([*targets, *rule.state]), "p"]


def line_of(rule: Rule, value: str) -> str:
    """The last line of a rule's step that assigns a value, and where it stands where that is known."""
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

    `names` gives their name for states of ours. Any other state of ours is matched with the first of theirs that
    holds the same values after a step, and left out of the comparison until one does.
    """
    found = Differences()
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
                    _join(found, step, name, tensor, (value, other), scale[key], tolerance)
        advance()
    return found


def _match(
    names: Sequence[str], ours: Values, theirs: Values, taken: Iterable[str], tolerance: float
) -> dict[str, str]:
    """For states of ours the one of theirs that holds the same values, not all zero, in every tensor."""
    found: dict[str, str] = {}
    for name in names:
        for other in [k for k in theirs[0] if k not in {*taken, *found.values()}]:
            pairs = [(a[name], b[other]) for a, b in zip(ours, theirs, strict=True) if name in a and other in b]
            if len(pairs) == len(ours) and all(_equal(a, b, tolerance) for a, b in pairs):
                found[name] = other
                break
    return found


def _equal(a: Array, b: Array, tolerance: float) -> bool:
    scale = _magnitude(b)
    return scale > 0 and a.shape == b.shape and float(np.max(_relative(a, b, scale), initial=0.0)) <= tolerance


def _join(
    found: Differences, step: int, name: str, tensor: int, values: tuple[Array, Array], scale: float, tolerance: float
) -> None:
    a, b = (np.asarray(v, np.float64) for v in values)
    if a.shape != b.shape:
        if a.size != b.size:
            raise RulecError(f"{name} has shape {a.shape} on one side and {b.shape} on the other: name other states")
        b = b.reshape(a.shape)
    relative = _relative(a, b, scale)
    worst = float(np.max(relative, initial=0.0))
    found.largest[name] = max(found.largest.get(name, 0.0), worst)
    if worst > tolerance and found.first is None:
        at = np.unravel_index(int(np.argmax(relative > tolerance)), relative.shape)
        found.first = Parting(step, name, tensor, tuple(int(i) for i in at), float(a[at]), float(b[at]))


def _relative(a: Array, b: Array, scale: float) -> Array:
    """Differences in parts of `scale`: none where both are NaN or the same infinity, infinite where one alone is."""
    with np.errstate(invalid="ignore"):
        same = (a == b) | (np.isnan(a) & np.isnan(b))
        apart = np.abs(a - b) / (scale or 1.0)
    return np.where(same, 0.0, np.where(np.isfinite(apart), apart, np.inf))


def _magnitude(values: Array) -> float:
    finite = np.abs(np.asarray(values, np.float64))
    return float(np.max(finite, initial=0.0, where=np.isfinite(finite)))
