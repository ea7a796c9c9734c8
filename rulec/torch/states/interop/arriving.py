"""Saved groups and states of other libraries, renamed for rulec: by the libraries' names alone, and of schedulefree.

schedulefree counts the steps of a group, and has another name for a state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rulec.checkpoint.content import meaning
from rulec.errors import StateMismatch
from rulec.language.library.load import load
from rulec.runtime.buckets.scalar_table import is_count
from rulec.torch.groups.interface import COUNTS, Interface
from rulec.torch.states.interop.load import group_here

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
    """A saved group, and the states of its parameters in order, with the keywords and names of rulec's class.

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


#: The name of a rule -> the key of it in the library, and the rule's names of states by those there.
_RULES: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "ScheduleFreeAdamW": ("schedule_free_adamw", {"exp_avg_sq": "v"}),
    "ScheduleFreeRAdam": ("schedule_free_radam", {"exp_avg_sq": "v"}), "ScheduleFreeSGD": ("schedule_free_sgd", {}),
}  # fmt: skip

#: The keys of a group there: all have the first ones, and the others say nothing here.
_KEYS, _OTHERS = ("k", "weight_sum", "lr_max"), ("k", "scheduled_lr", "foreach", "silent_sgd_phase")


def is_schedule_free(group: Mapping[str, Any]) -> bool:
    """Whether a saved group is of schedulefree."""
    return all(key in group for key in _KEYS) and COUNTS["group"] not in group


def schedule_free_group(
    group: Mapping[str, Any], states: Sequence[Mapping[str, Any]], interface: Interface
) -> tuple[Mapping[str, Any], list[dict[str, Any]]]:  # fmt: skip
    """A saved group and the states of its parameters under rulec's names.

    StateMismatch where the class computes otherwise, or the count of steps is none.
    """
    entry = interface.entries[0]
    key, names = _RULES.get(entry.rule.name, ("", {}))
    if not key or meaning(entry.rule) != meaning(load(key)):
        raise StateMismatch(
            f"the saved states are of schedulefree, and {interface.name} computes otherwise: load them into one of "
            f"{', '.join(_RULES)}"
        )
    if not group.get("silent_sgd_phase", True):
        raise StateMismatch(f"{interface.name} takes no steps like those of schedulefree with silent_sgd_phase=False")
    steps = group["k"]
    if not is_count(steps):
        raise StateMismatch(f"k of a saved group is {steps!r:.80}, which is no count of steps")
    here = [
        {"step": float(steps), **{entry.outside(names.get(key, key)): value for key, value in state.items()}}
        if state
        else {}
        for state in states
    ]
    kept = {key: value for key, value in group.items() if key not in _OTHERS}
    return {**kept, COUNTS["group"]: int(steps)}, here
