"""The state of an optimizer in another library's layout, for an optimizer of that library to go on from."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from rulec.checkpoint.content import meaning
from rulec.compiler.layout import scale_name
from rulec.compiler.weights import is_part
from rulec.errors import RulecError, StateMismatch
from rulec.formats import Format
from rulec.language.library.load import load
from rulec.language.source import did_you_mean
from rulec.torch.groups.entries import GroupRule
from rulec.torch.groups.routes import Route, check_unsplit
from rulec.torch.states.interop.layouts import BitsAndBytes, HeldState, Layout, Numbers, TorchAO
from rulec.torch.states.states import Buffers
from rulec.torch.tensors.dtensor import check_whole

#: The layouts by name.
LAYOUTS: Mapping[str, Layout] = {"bitsandbytes": BitsAndBytes(), "torchao": TorchAO()}

#: The keys of a group that mean the same in every library.
_COMMON = ("params", "param_names", "initial_lr")


class WithStates(Protocol):
    """The members of `OptimizerStep` that a state dict is made of: parameters with their rules, names and states."""

    @property
    def routes(self) -> Sequence[Route]: ...
    @property
    def group_rules(self) -> Sequence[GroupRule]: ...
    @property
    def names(self) -> Sequence[str]: ...
    @property
    def buffers(self) -> Buffers: ...


def written(
    name: str, saved: Mapping[str, Any], machine: WithStates, groups: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """A state dict in the layout of this name. `saved` is the optimizer's own, of these groups.

    Its tensors are copies. Codes stay as they are where the library has their format and block; a warning names states
    that others are made of. RulecError for an unknown layout, and for parts of parameters; StateMismatch for a
    rule, a number or a parameter that the library does not compute with.
    """
    if name not in LAYOUTS:
        raise RulecError(f"there is no layout {name!r}{did_you_mean(name, LAYOUTS)}: layouts are {', '.join(LAYOUTS)}")
    layout, params = LAYOUTS[name], [route.param for route in machine.routes]
    check_whole(params, f"layout={name!r}")
    check_unsplit(machine.routes, f"layout={name!r}")
    rules = [_rule(name, group_rule) for group_rule in machine.group_rules]
    packed = [{key: group[key] for key in _COMMON if key in group} for group in saved["param_groups"]]
    there = [
        {**common, **layout.group(rule, group_rule, _numbers(group_rule, group))}
        for common, rule, group_rule, group in zip(packed, rules, machine.group_rules, groups, strict=True)
    ]
    states: dict[int, dict[str, Any]] = {}
    recodes: dict[str, None] = {}
    for place, route in enumerate(machine.routes):
        held, steps = _states(name, machine, place)
        if held:
            rule, entry = rules[route.group], machine.group_rules[route.group].entry
            formats, names = layout.formats(rule, held), {state: entry.outside(state) for state in held}
            states[place] = layout.state(rule, held, formats, names, steps, route.param)
            recodes |= dict.fromkeys(_recodes(held, formats, names))
    if recodes:
        warnings.warn(f"{name} stores states otherwise, and codes were made anew: {'; '.join(recodes)}", stacklevel=4)
    return {"state": states, "param_groups": there}


def _numbers(group_rule: GroupRule, group: Mapping[str, Any]) -> Numbers:
    return Numbers(group_rule.hyper(group), float(group.get("weight_decay", 0)))


def _rule(name: str, group_rule: GroupRule) -> str:
    """The key of the rule that a group runs. StateMismatch where the library does not compute it."""
    rule = group_rule.entry.rule
    if group_rule.maximize:
        raise StateMismatch(f"{name} does not go up the gradient, and {group_rule.entry.owner} has maximize=True")
    known = LAYOUTS[name].rules
    if rule.key not in known or meaning(rule) != meaning(load(rule.key)):
        raise StateMismatch(
            f"{name} has no optimizer that computes {rule.name}: layout={name!r} is for {', '.join(known)}"
        )
    return rule.key


def _states(name: str, machine: WithStates, place: int) -> tuple[dict[str, HeldState], int]:
    """The states of a parameter by the rule's names, and its updates; none before the first.

    StateMismatch where it has a memory that no other library knows, or is complex.
    """
    param, owner = machine.routes[place].param, machine.names[place]
    buffers, formats = dict(machine.buffers.written(place)), machine.buffers.formats_here(place)
    if param.is_complex():
        raise StateMismatch(f"{owner} is complex, which {name} does not update")
    parts = [key for key in buffers if is_part(key)]
    if parts:
        raise StateMismatch(
            f"{owner} is stored in parts, and {name} has no place for {parts[0]}: load the state into an optimizer "
            f"without weights first"
        )
    steps = int(buffers.pop("step", 0))
    states = {
        state: HeldState(value, buffers.get(scale_name(state)), formats.get(state), tuple(param.shape))
        for state, value in buffers.items()
        if "::" not in state
    }
    return states, steps


def _recodes(states: Mapping[str, HeldState], formats: Mapping[str, Format], names: Mapping[str, str]) -> list[str]:
    """The states whose codes are made anew, each as a clause."""
    return [
        f"{names[state]} from {here.text if (here := states[state].form) else 'floats'} to {form.text}"
        f"{_sign(states[state], form)}"
        for state, form in formats.items()
        if not states[state].has(form)
    ]


def _sign(state: HeldState, form: Format) -> str:
    """A word on the sign, where that is new."""
    if state.form is None or state.form.signed == form.signed:
        return ""
    return " with a sign" if form.signed else " without a sign"
