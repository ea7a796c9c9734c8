"""What a strategy saves, and whether what was saved is its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rulec.errors import StateMismatch
from rulec.es.perturbations import Perturbations


def saved(perturbations: Perturbations, step: int, names: Sequence[str]) -> dict[str, Any]:
    """What a resumed run goes on from: the number of the next step, and of what its noise is a function."""
    return {"step": step, **perturbations.saved(), "parameters": list(names)}


def restored(state: Mapping[str, Any], perturbations: Perturbations, names: Sequence[str]) -> tuple[Perturbations, int]:
    """The perturbations and the number of the next step.

    StateMismatch where these are of another perturbation, but for its sigma, or of other parameters.
    """
    found = state if isinstance(state, Mapping) else {}
    step = found.get("step")
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise StateMismatch("this is no state of an evolution strategy: it has no step and no perturbation")
    own = perturbations.restored(found)
    if list(found.get("parameters", ())) != list(names):
        raise StateMismatch("the saved state is of other parameters than those perturbed here: give it the same")
    return own, step
