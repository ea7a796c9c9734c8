"""Saved groups and states of other libraries on their way here, under names of those libraries alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rulec.errors import StateMismatch
from rulec.torch.groups.interface import Interface
from rulec.torch.states.interop.numbered import group_here
from rulec.torch.states.interop.schedulefree import is_schedule_free, schedule_free_group

#: Names in a state or a group -> the optimizer that has them, of which nothing is read.
_UNREAD: Mapping[tuple[str, ...], str] = {
    ("exp_avg_sq_row",): "an Adafactor of transformers",
    ("relative_step", "scale_parameter"): "an Adafactor of transformers",
    ("d_numerator", "growth_rate"): "prodigyopt",
    ("p0", "s"): "prodigyopt",
}


def arrived(
    group: Mapping[str, Any], states: Sequence[Any], interface: Interface, defaults: Mapping[str, Any]
) -> tuple[Mapping[str, Any], Sequence[Any]]:
    """A saved group, and the states of its parameters in order, with the keywords and names of a class here.

    Codes stay as they are. StateMismatch for a layout that is not read, and where the class computes otherwise.
    """
    if is_schedule_free(group):
        return schedule_free_group(group, [state if isinstance(state, Mapping) else {} for state in states], interface)
    known = {entry.outside(name) for entry in interface.entries for name in entry.rule.state} | defaults.keys()
    for place in (group, *(state for state in states if isinstance(state, Mapping))):
        for names, owner in _UNREAD.items():
            if all(name in place and name not in known for name in names):
                raise StateMismatch(
                    f"the saved states are of {owner}, whose layout is not read here: start {interface.name} without "
                    f"them, or copy its states by name into optimizer.state"
                )
    return group_here(group, states, interface, defaults), states
