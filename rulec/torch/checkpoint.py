"""Checkpoints in the format of all frameworks: `rulec.jax` goes on from them, and writes those that are loaded here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from rulec.checkpoint import Checkpoint, Own, Parameter, Stored, matched, meaning, read, write
from rulec.checkpoint.match import Axes, Names, group_numbers, group_steps
from rulec.compiler.routing import Router
from rulec.errors import RulecError, StateMismatch, TensorError
from rulec.language.rule import Rule
from rulec.language.traits import draws
from rulec.torch.assembly import Assembly
from rulec.torch.flavour import Choice
from rulec.torch.interface import COUNTS
from rulec.torch.optimizer import RuleOptimizer
from rulec.torch.partitioned import Partitioned
from rulec.torch.placed import check_whole
from rulec.torch.routes import Route, Routing
from rulec.torch.tensors import DTYPES, dtype_name
from rulec.torch.values import choices_of


def save(optimizer: RuleOptimizer, file: str | Path, *, parameters: bool = False) -> None:
    """Writes an optimizer's state, with `parameters` these too, as a safetensors file that every framework loads.

    Parameters are called by their names (`model.named_parameters()`) with `/` for `.`, or else `0`, `1`, ... in their
    order. The file is there as a whole, or the one before it stays. Raises RulecError for what cannot be saved, OSError
    where the file cannot be written.
    """
    _check(optimizer, "save")
    assembly, names = optimizer._current(), _names(optimizer)
    rules, described = _rules(optimizer), []
    for place, route in enumerate(assembly.routes):
        states = _states(assembly, place)
        rule, param = rules[place], route.param.detach()
        described.append(
            Parameter(
                names[place], tuple(param.shape), dtype_name(param.dtype), rule.name, meaning(rule), place, route.group,
                int(states.pop("step", 0)), {k: _stored(v) for k, v in states.items()},
                _stored(param) if parameters else None,
            )
        )  # fmt: skip
    write(file, replace(_of_groups(optimizer, assembly), parameters=described))


def load(
    optimizer: RuleOptimizer, file: str | Path, *, names: Names = None, axes: Axes = None,
    rule_may_differ: bool = False, parameters: bool = False,
) -> None:  # fmt: skip
    """Goes on from a file that `save` has written here, or in another framework; with `parameters` takes these too.

    Values are copied into this optimizer's buffers, which keep their own dtypes; its hyper-parameters stay as they are.
    `names` is a mapping of the file's names to those here, or a function; `axes` gives for parameters, by their names
    here, which axis of the file each of theirs is, as in `{"dense.weight": (1, 0)}`. StateMismatch, before anything is
    written, where the file belongs to other parameters or another rule (which `rule_may_differ` allows), or is damaged.
    """
    _check(optimizer, "load")
    checkpoint, names_here = read(file), _names(optimizer)
    routes, rules = optimizer.routing(), _rules(optimizer)
    own = [
        Own(name, tuple(route.param.shape), rule, place)
        for place, (name, route, rule) in enumerate(zip(names_here, routes, rules, strict=True))
    ]
    seed = optimizer.param_groups[0].get("seed", 0)
    checkpoint, places = matched(file, checkpoint, own, _with_slashes(names), _axes(axes), rule_may_differ, seed)
    saved = [checkpoint.parameters[place] for place in places]
    values = _values(file, saved) if parameters else []
    optimizer.load_state_dict(_state_dict(optimizer, routes, saved, _shared(optimizer, file, checkpoint, places)))
    _set_counts(optimizer, saved)
    with torch.no_grad():
        for route, value in zip(routes if parameters else (), values, strict=True):
            route.param.copy_(value)


def _check(optimizer: Any, verb: str) -> None:
    """RulecError for what has no state of ours, or one that no other framework could go on from."""
    if not isinstance(optimizer, RuleOptimizer):
        raise RulecError(_not_ours(optimizer, verb))
    if optimizer.interface.evaluates and not optimizer.param_groups[0]["train_mode"]:
        raise RulecError(f"the parameters are where {optimizer.interface.name} is evaluated: call train() to {verb}")
    for name, param in zip(_names(optimizer), _params(optimizer), strict=True):
        if param.is_complex():
            raise TensorError(f"{name} is complex, which other frameworks' rules are not: use state_dict()")
    check_whole(_params(optimizer), verb)


def _not_ours(optimizer: Any, verb: str) -> str:
    kind = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    if isinstance(optimizer, Partitioned):
        return f"a Partitioned has one optimizer for each class: {verb} each of its optimizers, in a file of its own"
    if isinstance(optimizer, Optimizer):
        return (
            f"{verb} takes an optimizer of rulec.torch, not {kind}: load its state_dict() into the class of its name "
            f"there, where there is one"
        )
    return f"{verb} takes an optimizer of rulec.torch, not a {kind}"


def _params(optimizer: RuleOptimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _names(optimizer: RuleOptimizer) -> list[str]:
    """The parameters' paths, or their places."""
    found: list[str] = []
    for group in optimizer.param_groups:
        named = len(group.get("param_names", ())) == len(group["params"])
        places = range(len(found), len(found) + len(group["params"]))
        found += [name.replace(".", "/") for name in group["param_names"]] if named else map(str, places)
    return found


def _with_slashes(names: Names) -> Names:
    """The same, giving names with `/` where they have `.`, as parameters are called in torch."""
    if names is None:
        return None
    if isinstance(names, Mapping):
        return {theirs: ours.replace(".", "/") for theirs, ours in names.items()}
    given = names
    return lambda name: given(name).replace(".", "/")


def _axes(axes: Axes) -> Axes:
    return {name.replace(".", "/"): order for name, order in (axes or {}).items()}


# Rules


def _rules(optimizer: RuleOptimizer) -> list[Rule]:
    """The rule of each parameter as another framework has it: with hyper-parameters where torch leaves them unset."""
    choices = choices_of(optimizer.interface, optimizer.param_groups)
    routers = [Router(choice.flavour.composed(choice.decay)) for choice in choices]
    return [
        routers[route.group].choose(tuple(route.param.shape), route.tags, route.name) for route in optimizer.routing()
    ]


# What is saved


def _states(assembly: Assembly, place: int) -> dict[str, Any]:
    """A parameter's states by the rule's own names, and its step count; empty before its first update."""
    member, tensor_id = assembly._homes[place]
    return member.engine.state(tensor_id)


def _stored(tensor: Any) -> Stored:
    here = tensor.detach().cpu().contiguous()
    bits = here.view(torch.uint16) if here.dtype is torch.bfloat16 else here
    return Stored.of(bits.numpy(), dtype_name(here.dtype))


def _of_groups(optimizer: RuleOptimizer, assembly: Assembly) -> Checkpoint:
    """What the groups and the model remember, and everything else that belongs to no parameter."""
    groups, levels = optimizer.param_groups, optimizer.interface.shared
    by_level: dict[str, list[str]] = {"group": [], "model": []}
    for name, level in levels.items():
        if all(name in group for group in groups):
            by_level[level].append(name)
    drawing = any(draws(rule) for rule in optimizer.interface.rules)
    return Checkpoint(
        [], [choice.hyper(group) for choice, group in zip(assembly.choices, groups, strict=True)],
        {name: [float(group[name]) for group in groups] for name in by_level["group"]},
        [int(group.get(COUNTS["group"], 0)) for group in groups],
        {name: float(groups[0][name]) for name in by_level["model"]},
        int(groups[0].get(COUNTS["model"], 0)),
        int(groups[0].get("seed", 0)) if drawing else None,
    )  # fmt: skip


# What is loaded


def _state_dict(
    optimizer: RuleOptimizer, routes: Routing, saved: Sequence[Parameter], shared: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """The saved states as torch lays them out, for this optimizer's own groups."""
    choices = choices_of(optimizer.interface, optimizer.param_groups)
    # What groups remembered until now goes: where the file has nothing of it, nothing was updated when it was saved.
    old = {*optimizer.interface.shared, *COUNTS.values()}
    kept = [{k: v for k, v in g.items() if k not in old} for g in optimizer.state_dict()["param_groups"]]
    groups = [{**group, **own} for group, own in zip(kept, shared, strict=True)]
    states = {i: _outside(choices[r.group], r, p) for i, (r, p) in enumerate(zip(routes, saved, strict=True))}
    return {"state": {i: found for i, found in states.items() if found}, "param_groups": groups}


def _outside(choice: Choice, route: Route, saved: Parameter) -> dict[str, Tensor]:
    """A parameter's states under torch's names."""
    flavour = choice.flavour
    found = {
        flavour.outside(state, route.routed): _tensor(saved.states[state])
        for state in route.rule.state if state in saved.states
    }  # fmt: skip
    if saved.steps and not found and route.rule.state:
        raise StateMismatch(f"{saved.name} was updated {saved.steps} times, and none of its states was saved")
    if (flavour.counted or route.routed) and (found or saved.steps):
        found["step"] = torch.tensor(float(saved.steps), dtype=torch.float64)
    return found


def _tensor(stored: Stored) -> Tensor:
    raw = torch.from_numpy(stored.data)
    return raw.view(DTYPES[stored.dtype]).reshape(stored.shape)


def _values(file: str | Path, saved: Sequence[Parameter]) -> list[Tensor]:
    for p in saved:
        if p.value is None:
            raise StateMismatch(f"{file} has no value of {p.name}: it was saved without parameters=True")
    return [_tensor(p.value) for p in saved if p.value is not None]


def _shared(
    optimizer: RuleOptimizer, file: str | Path, checkpoint: Checkpoint, places: Sequence[int]
) -> list[dict[str, Any]]:
    """For each group what it and the model remember."""
    levels, count = optimizer.interface.shared, len(optimizer.param_groups)
    found: list[dict[str, Any]] = [{} for _ in range(count)]
    if not levels or not (checkpoint.group_numbers or checkpoint.model_numbers):
        return found
    own = [route.group for route in optimizer.routing()]
    numbers = group_numbers(file, checkpoint, places, own, count)
    if numbers:
        numbers[COUNTS["group"]] = [*group_steps(file, checkpoint, places, own, count)]
    for i, group in enumerate(found):
        group.update({name: values[i] for name, values in numbers.items() if name in {*levels, COUNTS["group"]}})
        group.update({name: value for name, value in checkpoint.model_numbers.items() if name in levels})
        if checkpoint.model_numbers:
            group[COUNTS["model"]] = checkpoint.model_steps
    return found


def _set_counts(optimizer: RuleOptimizer, saved: Sequence[Parameter]) -> None:
    """The true counts, where torch's layout keeps none."""
    assembly = optimizer._current()
    for place, parameter in enumerate(saved):
        states = _states(assembly, place)
        if states:
            states["step"].fill_(parameter.steps)
