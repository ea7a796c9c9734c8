"""The saved state of a strategy, and whether a saved state belongs to one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rulec.errors import StateMismatch
from rulec.es.perturbations import Perturbations


def saved(perturbations: Perturbations, step: int, names: Sequence[str]) -> dict[str, Any]:
    """The state that a resumed run goes on from: the number of the next step, and the arguments of its noise."""
    return {"step": step, **perturbations.saved(), "parameters": list(names)}


def restored(state: Mapping[str, Any], perturbations: Perturbations, names: Sequence[str]) -> tuple[Perturbations, int]:
    """The perturbations and the number of the next step.

    StateMismatch where the state is of another perturbation, its sigma aside, or of other parameters.
    """
    content = state if isinstance(state, Mapping) else {}
    step = content.get("step")
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise StateMismatch("this is no state of an evolution strategy: it has no step and no perturbation")
    resumed = perturbations.restored(content)
    if list(content.get("parameters", ())) != list(names):
        raise StateMismatch("the saved state is of other parameters than those perturbed here: give it the same")
    return resumed, step
