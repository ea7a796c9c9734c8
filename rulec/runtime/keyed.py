"""States by key: the name of a state and the number of its tensor, in one order on every backend.

A state of a group or of the model has no tensor. The step counts stand among the states.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: The name of a state, and the number of its tensor; None for a state of the groups or the model.
Key = tuple[str, int | None]

#: The name of a tensor's step count, and those of groups and of the model where these have states.
COUNT = "step"
COUNTS = {"group": "group_updates", "model": "model_updates"}


def in_order(states: Mapping[Key, Any]) -> dict[Key, Any]:
    """The states of each tensor in turn, its step count first; then those of groups and the model, step counts last."""
    return {key: states[key] for key in sorted(states, key=_rank)}


def _rank(key: Key) -> tuple[Any, ...]:
    name, number = key
    if number is None:
        return True, 0, name in COUNTS.values(), name
    return False, number, name != COUNT, name
