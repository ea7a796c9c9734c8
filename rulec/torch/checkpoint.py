"""Checkpoints in the format of all frameworks, of optimizers of torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from rulec import checkpoint
from rulec.checkpoint import Axes, Leaf, Loaded, Names, Parameter, Shared, Stored
from rulec.checkpoint.convert import settled
from rulec.checkpoint.loading import with_slashes
from rulec.compiler.routing import Router
from rulec.compiler.weights import part_name
from rulec.errors import RulecError, TensorError
from rulec.torch.groups.entries import GroupRule
from rulec.torch.groups.interface import COUNTS
from rulec.torch.groups.routes import Route, Routes, check_unsplit
from rulec.torch.groups.values import group_rules_of
from rulec.torch.optimizer import RuleOptimizer
from rulec.torch.partitioned import Partitioned
from rulec.torch.states.saved import FORMATS
from rulec.torch.step.optimizer_step import OptimizerStep
from rulec.torch.tensors.dtensor import check_whole
from rulec.torch.tensors.fake import resolved
from rulec.torch.tensors.tensors import STATE_DTYPES, dtype_name


def save(optimizer: RuleOptimizer, file: str | Path, *, parameters: bool = False) -> None:
    """Writes an optimizer's state, and with `parameters` the parameters, as a safetensors file for every framework.

    Parameters are called by their names (`model.named_parameters()`) with `/` for `.`, or else `0`, `1`, ... in their
    order. The file is there as a whole, or the one before it stays. Raises RulecError for what cannot be saved, OSError
    where the file cannot be written.
    """
    checkpoint.save(_run(optimizer, "save"), file, parameters)


def load(
    optimizer: RuleOptimizer, file: str | Path, *, names: Names = None, axes: Axes = None,
    rule_may_differ: bool = False, parameters: bool = False,
) -> None:  # fmt: skip
    """Goes on from a file of `save`, here or in another framework; with `parameters` takes the parameters too.

    Values are copied into this optimizer's buffers, which keep their own dtypes; its hyper-parameters stay as they are.
    `names` is a mapping of the file's names to the names here, or a function. `axes` has for parameters, by their names
    here, the axis of the file for each of their own, as in `{"dense.weight": (1, 0)}`. StateMismatch, before anything
    is written, where the file belongs to other parameters or another rule (`rule_may_differ` allows another rule), or
    is damaged.
    """
    run, groups = _run(optimizer, "load"), len(optimizer.param_groups)
    turned = {name.replace(".", "/"): order for name, order in (axes or {}).items()}
    run.take(checkpoint.load(run, file, groups, with_slashes(names), turned, rule_may_differ, parameters))


def _run(optimizer: Any, verb: str) -> TorchRun:
    """RulecError where it is no optimizer of ours, or no other framework could go on from it."""
    if not isinstance(optimizer, RuleOptimizer):
        raise RulecError(_not_ours(optimizer, verb))
    if optimizer.interface.evaluates and not optimizer.param_groups[0]["train_mode"]:
        raise RulecError(f"the parameters are where {optimizer.interface.name} is evaluated: call train() to {verb}")
    params: list[Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
    for name, param in zip(names_of(optimizer), params, strict=True):
        if param.is_complex():
            raise TensorError(f"{name} is complex, which other frameworks' rules are not: use state_dict()")
    check_whole(params, verb)
    check_unsplit(optimizer.routing(), verb)
    return TorchRun(optimizer, optimizer._options.seed or int(optimizer.param_groups[0].get("seed", 0)))


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


@dataclass(frozen=True)
class TorchRun:
    """An optimizer of torch, in the terms of `rulec.checkpoint.Run`."""

    optimizer: RuleOptimizer
    seed: int

    @cached_property
    def routes(self) -> Routes:
        """The rule that each parameter goes to in torch."""
        return self.optimizer.routing()

    @cached_property
    def machine(self) -> OptimizerStep:
        """The machine for the groups and states as they are when this is first read."""
        return self.optimizer._current()

    @cached_property
    def group_rules(self) -> Sequence[GroupRule]:
        """The rule that each group's keywords mean."""
        return group_rules_of(self.optimizer.interface, self.optimizer.param_groups)

    def leaves(self) -> list[Leaf]:
        """The parameters, with their rules as other frameworks have them: no hyper-parameter is left unset there."""
        routers = [
            Router(group_rule.entry.composed(group_rule.decay, transforms=group_rule.transforms))
            for group_rule in self.group_rules
        ]
        hypers = self._hypers()
        return [
            Leaf(
                name, tuple(route.param.shape), dtype_name(route.param.dtype),
                routers[route.group].choose(tuple(route.param.shape), route.tags, route.name), place, route.group,
                self.machine.buffers.rounds(place),
                part_name(self.optimizer._options.weights, dtype_name(route.param.dtype)), hypers[route.group],
            )
            for place, (name, route) in enumerate(zip(names_of(self.optimizer), self.routes, strict=True))
        ]  # fmt: skip

    def states(self, place: int) -> tuple[int, dict[str, Stored]]:
        """The number of updates and the states by the rule's own names; none before the first update."""
        states, formats = self.buffers(place), self.machine.buffers.formats_here(place)
        keys = {name: form.key for name, form in formats.items()} | self.machine.buffers.unbiased_here(place)
        return int(states.pop("step", 0)), {name: stored(x, keys.get(name, "")) for name, x in states.items()}

    def buffers(self, place: int) -> dict[str, Tensor]:
        """The live states of a parameter, and their `step`."""
        return self.machine.buffers.written(place)

    def value(self, place: int) -> Stored:
        """The parameter itself."""
        return stored(self.routes[place].param)

    def _hypers(self) -> list[dict[str, Any]]:
        """The hyper-parameters of each group."""
        groups = self.optimizer.param_groups
        return [group_rule.hyper(group) for group_rule, group in zip(self.group_rules, groups, strict=True)]

    def shared(self) -> Shared:
        """Hyper-parameters, and the numbers that stand in the groups."""
        groups = self.optimizer.param_groups
        kept = [name for name in self.optimizer.interface.shared if all(name in group for group in groups)]
        return Shared(
            self._hypers(),
            {name: [float(group[name]) for group in groups] for name in kept},
            [int(group.get(COUNTS["group"], 0)) for group in groups], int(groups[0].get(COUNTS["model"], 0)),
        )  # fmt: skip

    def take(self, loaded: Loaded) -> None:
        """Goes on from the content of a file; StateMismatch, before anything is written, where it does not fit."""
        values = [*map(tensor_of, loaded.values)]
        self.optimizer.load_state_dict(self._state_dict(loaded))
        after = TorchRun(self.optimizer, self.seed)
        for place, saved in enumerate(loaded.parameters):
            buffers = after.buffers(place)
            if buffers:  # torch's layout keeps no count of some classes
                buffers["step"].fill_(saved.steps)
        with torch.no_grad():
            for route, value in zip(self.routes if values else (), values, strict=True):
                route.param.copy_(value)

    def _state_dict(self, loaded: Loaded) -> dict[str, Any]:
        """The content of a file as torch lays it out, for this optimizer's own groups."""
        # Numbers that groups have now go: where the file has none, nothing was updated when it was saved.
        dropped = {*self.optimizer.interface.shared, *COUNTS.values(), FORMATS}
        parameters, keys = settled(loaded.parameters)
        groups = [
            {**{k: v for k, v in group.items() if k not in dropped}, **_numbers(loaded, place)}
            for place, group in enumerate(self.optimizer.state_dict()["param_groups"])
        ]
        for route in self.routes if keys else ():
            entry = self.group_rules[route.group].entry
            outside = {entry.outside(name, route.routed): key for name, key in keys.items()}
            groups[route.group][FORMATS] = groups[route.group].get(FORMATS, {}) | outside
        states = [
            _states(self.group_rules[route.group], route, saved)
            for route, saved in zip(self.routes, parameters, strict=True)
        ]
        return {"state": {place: named for place, named in enumerate(states) if named}, "param_groups": groups}


def names_of(optimizer: RuleOptimizer) -> list[str]:
    """The parameters' paths with `/` for `.`, or their places."""
    names: list[str] = []
    for group in optimizer.param_groups:
        named = len(group.get("param_names", ())) == len(group["params"])
        places = range(len(names), len(names) + len(group["params"]))
        names += [name.replace(".", "/") for name in group["param_names"]] if named else map(str, places)
    return names


def stored(tensor: Tensor, format: str = "") -> Stored:
    """A tensor's bytes; those of codes with the key of their format."""
    here = resolved(tensor.detach().cpu().contiguous())
    bits = here.view(torch.uint16) if here.dtype is torch.bfloat16 else here
    return Stored.of(bits.numpy(), str(here.dtype).removeprefix("torch."), format)


def tensor_of(array: Stored) -> Tensor:
    """A tensor over the bytes of a file."""
    return torch.from_numpy(array.data).view(STATE_DTYPES[array.dtype]).reshape(array.shape)


def _states(group_rule: GroupRule, route: Route, saved: Parameter) -> dict[str, Tensor]:
    """A parameter's states under torch's names."""
    entry = group_rule.entry
    states = {entry.outside(name, route.routed): tensor_of(array) for name, array in saved.states.items()}
    if (entry.counted or route.routed) and saved.begun:
        states["step"] = torch.tensor(float(saved.steps), dtype=torch.float64)
    return states


def _numbers(loaded: Loaded, group: int) -> Mapping[str, float]:
    """The numbers and counts of a group, those of the model included."""
    counts = {COUNTS["group"]: loaded.group_steps, COUNTS["model"]: loaded.model_steps}
    kept = {**loaded.numbers, **{name: steps for name, steps in counts.items() if steps}}
    return {name: values[group if len(values) > 1 else 0] for name, values in kept.items()}
