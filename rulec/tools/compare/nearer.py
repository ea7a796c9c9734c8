"""Which side of a comparison is nearer to the rule's formulas in 50 digits, where the two sides differ."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rulec.tools.compare.difference import Trial, Values, magnitude
from rulec.tools.compare.oracle import distance
from rulec.tools.compare.sides import Side

#: A side that is so many times nearer than the other is called the nearer one.
CLEARLY = 2.0

#: A distance above this is more than a side makes that rounds parts to float32.
ROUNDING = 1e-5


@dataclass(frozen=True)
class Nearness:
    """The largest distances of both sides from the exact value over all steps.

    The unit is the largest exact magnitude of the tensor so far.
    """

    ours: float
    theirs: float

    @property
    def nearer(self) -> str:
        """`ours`, `theirs`, or `neither` where both are about as near."""
        if self.ours * CLEARLY < self.theirs:
            return "ours"
        return "theirs" if self.theirs * CLEARLY < self.ours else "neither"


def nearness(
    ours: Side, theirs: Side, exact: Side, trial: Trial, names: Mapping[str, str],
    advance: Callable[[], Any] = lambda: None,
) -> dict[str, Nearness]:  # fmt: skip
    """The nearness of values of a trial; all three sides are at its start.

    `names` is value of ours, and of the exact side -> value of theirs. RuleError for a function without a 50-digit
    form.
    """
    farthest = {name: [0.0, 0.0] for name in names}
    largest: dict[tuple[str, int], float] = {}
    for grads in trial.gradients():
        for side in (ours, theirs, exact):
            side.step([g.copy() for g in grads])
        known = exact.values()
        for place, values in enumerate((ours.values(), _renamed(theirs.values(), names))):
            for name, tensor, apart, size in _apart(values, known, names):
                largest[name, tensor] = max(largest.get((name, tensor), 0.0), size)
                farthest[name][place] = max(farthest[name][place], apart / (largest[name, tensor] or 1.0))
        advance()
    return {name: Nearness(*far) for name, far in farthest.items()}


def _renamed(values: Values, names: Mapping[str, str]) -> Values:
    return [{name: each[other] for name, other in names.items() if other in each} for each in values]


def _apart(values: Values, exact: Values, names: Iterable[str]) -> Iterable[tuple[str, int, float, float]]:
    """Name, tensor, largest distance from the exact value and largest exact magnitude."""
    for tensor, (a, b) in enumerate(zip(values, exact, strict=True)):
        for name in (name for name in names if name in a and name in b):
            known = np.asarray(b[name])
            apart = distance(np.asarray(a[name]).astype(np.float64).reshape(known.shape), known)
            yield name, tensor, float(np.max(apart, initial=0.0)), magnitude(known.astype(np.float64))


def verdict(rule: str, near: Mapping[str, Nearness]) -> str:
    """A sentence on which side is nearer to 50 digits of the rule's formulas."""
    words = {"ours": "ours is nearer", "theirs": "theirs is nearer", "neither": "both are equally near"}
    names = {word: [name for name, each in near.items() if each.nearer == word] for word in words}
    parts = [f"{words[word]} in {_listed(several)}" for word, several in names.items() if several]
    return f"beside {rule}'s formulas in 50 digits, {', and '.join(parts)}{_beyond_rounding(near)}"


def _beyond_rounding(near: Mapping[str, Nearness]) -> str:
    """What a distance beyond rounding says; no text where no distance is so large."""
    ours, theirs = (max(getattr(each, side) for each in near.values()) for side in ("ours", "theirs"))
    if ours > ROUNDING:
        return f"; {ours:.1e} of ours is more than float32 rounds: its digits cancel, or a dtype in between is shorter"
    if theirs > ROUNDING:
        return (
            f"; {theirs:.1e} of theirs is more than float32 rounds: theirs has other formulas, other hyper-parameters, "
            f"or a shorter dtype in between"
        )
    return ""


def _listed(names: Sequence[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last
