"""What a strategy saves, and whether what was saved is its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rulec.errors import StateMismatch
from rulec.es.perturbation import Perturbation


def saved(perturbation: Perturbation, step: int, names: Sequence[str]) -> dict[str, Any]:
    """What a resumed run goes on from: the number of the next step, and of what its noise is a function."""
    return {"step": step, "perturbation": perturbation.as_dict(), "parameters": list(names)}


def step_of(state: Mapping[str, Any], perturbation: Perturbation, names: Sequence[str]) -> int:
    """The number of the next step; StateMismatch where it is of another perturbation or of other parameters."""
    found = state if isinstance(state, Mapping) else {}
    step, fields = found.get("step"), found.get("perturbation")
    if not isinstance(step, int) or not isinstance(fields, Mapping) or step < 0:
        raise StateMismatch("this is no state of an evolution strategy: it has no step and no perturbation")
    own = perturbation.as_dict()
    for name in {**own, **fields}:
        if own.get(name) != fields.get(name):
            raise StateMismatch(
                f"the saved perturbation has {name}={fields.get(name)!r}, where this one has {own.get(name)!r}"
            )
    if list(found.get("parameters", ())) != list(names):
        raise StateMismatch("the saved state is of other parameters than those perturbed here: give it the same")
    return step
