"""Checkpoints in the format of all frameworks, of optimizers of plain arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rulec.array.checks import checked_hyper
from rulec.array.optimizer import Optimizer
from rulec.checkpoint import Checkpoint, Own, Parameter, Stored, matched, meaning, read, write
from rulec.checkpoint.match import Axes, Names, group_numbers, group_steps
from rulec.errors import RulecError, StateMismatch
from rulec.language.rule import Rule
from rulec.language.traits import draws


def save(optimizer: Optimizer, file: str | Path, *, parameters: bool = False) -> None:
    """Writes an optimizer's state, with `parameters` these too, as a safetensors file that every framework loads.

    Parameters have the names of `optimizer.names`; a single array is called `0`. The file is there as a whole, or the
    one before it stays. RulecError where the parameters are where the rule is evaluated.
    """
    saved, rules = _in_training(optimizer, "save").state_dict(), _rules(optimizer)
    described = [
        _described(optimizer, place, rules[place], dict(saved["state"].get(name, {})), parameters)
        for place, name in enumerate(optimizer.names)
    ]
    levels = _levels(rules)
    shared = {name: value.tolist() for name, value in saved["shared"].items()}
    hyper = checked_hyper(optimizer.rule.name, optimizer._engine.hyper, saved["hyper"])
    checkpoint = Checkpoint(
        described, [hyper],
        {name: values for name, values in shared.items() if levels[name] == "group"},
        saved["counts"]["group"].astype(np.int64).tolist(),
        {name: values[0] for name, values in shared.items() if levels[name] == "model"},
        int(saved["counts"]["model"]), saved["seed"] if any(map(draws, rules)) else None,
    )  # fmt: skip
    write(file, checkpoint)


def load(
    optimizer: Optimizer, file: str | Path, *, names: Names = None, axes: Axes = None, rule_may_differ: bool = False,
    parameters: bool = False,
) -> None:  # fmt: skip
    """Goes on from a file that `save` has written here, or in another framework; with `parameters` takes these too.

    Values are copied into this optimizer's own dtypes; its hyper-parameters stay as they are. A parameter that had not
    been updated when the file was saved is as before its first update.

    `names` is a mapping of the file's names to those here, or a function; `axes` gives for parameters which axis of the
    file each of theirs is. StateMismatch, before anything is written, where the file belongs to other parameters or
    another rule (which `rule_may_differ` allows), or is damaged.
    """
    checkpoint, rules = read(file), _rules(_in_training(optimizer, "load"))
    own = [
        Own(_outside(name), tuple(optimizer._engine.params[name].shape), rule, place)
        for place, (name, rule) in enumerate(zip(optimizer.names, rules, strict=True))
    ]
    checkpoint, places = matched(file, checkpoint, own, names, axes, rule_may_differ, optimizer._engine.seed)
    saved = dict(zip(optimizer.names, (checkpoint.parameters[place] for place in places), strict=True))
    values = {name: _value(file, p) for name, p in saved.items()} if parameters else {}
    states = {
        name: {"step": np.float64(p.steps), **_states(p, rule)}
        for (name, p), rule in zip(saved.items(), rules, strict=True)
        if p.steps or p.states
    }
    shared = _shared(file, checkpoint, places, _levels(rules)) if states else {}
    hyper = checked_hyper(optimizer.rule.name, optimizer._engine.hyper, optimizer.hyper)
    optimizer.load_state_dict({"rule": optimizer.rule.name, "hyper": hyper, "state": states, **shared})
    with optimizer._engine.arrays.here():
        for name, value in values.items():
            optimizer._engine.arrays.fill(optimizer._engine.params[name], value)


def _in_training(optimizer: Any, verb: str) -> Optimizer:
    if not isinstance(optimizer, Optimizer):
        raise RulecError(f"{verb} takes an optimizer of rulec.array, not a {type(optimizer).__name__}")
    if not optimizer._training:
        raise RulecError(f"the parameters are where {optimizer.rule.name} is evaluated: call train() to {verb}")
    return optimizer


def _rules(optimizer: Optimizer) -> list[Rule]:
    return [optimizer._engine.tensors[optimizer._engine.ids[name]].rule for name in optimizer.names]


def _levels(rules: Sequence[Rule]) -> dict[str, str]:
    """The states that are one number for the group or the model, and which of these."""
    return {name: s.per for rule in rules for name, s in rule.state.items() if s.per in ("group", "model")}


def _outside(name: str) -> str:
    """What a parameter is called in the file."""
    return "0" if name == "param" else name


# What is saved


def _described(optimizer: Optimizer, place: int, rule: Rule, states: dict[str, Any], whole: bool) -> Parameter:
    name, arrays = optimizer.names[place], optimizer._engine.arrays
    param = optimizer._engine.params[name]
    steps = int(states.pop("step", 0))
    kept = {state: _stored(value) for state, value in states.items()}
    return Parameter(
        _outside(name), tuple(param.shape), arrays.dtype(param), rule.name, meaning(rule), place, 0, steps, kept,
        _stored(arrays.copied(param)) if whole else None,
    )  # fmt: skip


def _stored(array: np.ndarray[Any, Any]) -> Stored:
    dtype = array.dtype.name
    return Stored.of(array.view(np.uint16) if dtype == "bfloat16" else array, dtype)


# What is loaded


def _states(saved: Parameter, rule: Rule) -> dict[str, Any]:
    return {name: _array(value) for name, value in saved.states.items() if name in rule.state}


def _array(stored: Stored) -> np.ndarray[Any, Any]:
    """The values; those in bfloat16, which NumPy does not have, in float64."""
    return stored.wide if stored.dtype == "bfloat16" else stored.bits


def _value(file: str | Path, saved: Parameter) -> np.ndarray[Any, Any]:
    if saved.value is None:
        raise StateMismatch(f"{file} has no value of {saved.name}: it was saved without parameters=True")
    return _array(saved.value)


def _shared(
    file: str | Path, checkpoint: Checkpoint, places: Sequence[int], levels: Mapping[str, str]
) -> dict[str, Any]:
    """What the one group and the model remember, and how many steps they have taken."""
    own = [0] * len(places)
    found = group_numbers(file, checkpoint, places, own, 1) if checkpoint.group_numbers else {}
    steps = group_steps(file, checkpoint, places, own, 1) if checkpoint.group_numbers else [checkpoint.model_steps]
    numbers = {**found, **{name: [value] for name, value in checkpoint.model_numbers.items()}}
    return {
        "shared": {name: np.array(values) for name, values in numbers.items() if name in levels},
        "counts": {"group": np.array(steps, np.float64), "model": checkpoint.model_steps or steps[0]},
    }
