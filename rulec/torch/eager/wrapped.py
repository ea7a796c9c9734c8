"""What an eager optimizer is made of: the optimizer inside, of a rule, of a partition, or of someone else's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from rulec.errors import HyperError, RuleError
from rulec.language.partition import Partition
from rulec.language.rule import Rule
from rulec.language.rule_data import reads_layers
from rulec.torch.classes import optimizer as class_of
from rulec.torch.eager.inner import Inner, PartitionedInner, RuleInner
from rulec.torch.eager.scope import Scope, check_declared
from rulec.torch.groups.routes import names_of
from rulec.torch.groups.values import Groups
from rulec.torch.optimizer import RuleOptimizer
from rulec.torch.partitioned import Partitioned
from rulec.torch.states.saved import FORMATS
from rulec.torch.tensors.tensors import check_apart

#: The rules of an eager optimizer: a rule, its name or path, a partition, or a class or function that makes optimizers.
Runs = Rule | str | Path | Partition | type[Optimizer] | Callable[..., Optimizer]


class ForeignInner(Inner):
    """An optimizer of someone else's, who says that each tensor's update is its own."""

    def __init__(self, optimizer: Optimizer, scope: Scope | None) -> None:
        check_declared(optimizer, scope)
        check_apart([p for g in optimizer.param_groups for p in g["params"]], names_of(optimizer.param_groups))
        self.optimizer: Optimizer = optimizer
        self._step = _bare_step(optimizer)
        self._refused = ""

    def open(self) -> None:
        """RuleError where it was seen to remember something of more than one tensor."""
        if self._refused:
            raise RuleError(self._refused)

    def fire(self, places: tuple[int, ...], grads: Sequence[Tensor], arrived: bool = False) -> None:
        """Steps these parameters, with all others out of the groups for so long."""
        groups = self.optimizer.param_groups
        before = Frozen(groups)
        with _alone(self.optimizer, frozenset(places)), torch.no_grad():
            self._step(self.optimizer)
        key = before.changed(groups)
        if key is not None:
            self._refused = (
                f"a step of {type(self.optimizer).__name__} changes {key!r} of its group, which would happen several "
                f"times in one step: use the optimizer itself"
            )
            raise RuleError(self._refused)

    def close(self) -> None:
        """Does nothing: every parameter's step was complete."""


@contextmanager
def _alone(optimizer: Optimizer, places: frozenset[int]) -> Iterator[None]:
    """The groups with the parameters with these indices alone."""
    groups, kept = optimizer.param_groups, [group["params"] for group in optimizer.param_groups]
    first = 0
    try:
        for group, params in zip(groups, kept, strict=True):
            group["params"] = [p for i, p in enumerate(params, first) if i in places]
            first += len(params)
        optimizer.param_groups = [group for group in groups if group["params"]]
        yield
    finally:
        optimizer.param_groups = groups
        for group, params in zip(groups, kept, strict=True):
            group["params"] = params


def _bare_step(optimizer: Optimizer) -> Callable[[Optimizer], Any]:
    """The class's `step` without torch's hooks around it: these are run once in a step."""
    step: Any = type(optimizer).step
    bare: Callable[[Optimizer], Any] = getattr(step, "__wrapped__", step) if hasattr(step, "hooked") else step
    return bare


def inner_of(rule: Runs, params: Any, names: Mapping[int, str], scope: Any, keywords: Mapping[str, Any]) -> Inner:
    """The optimizer of a rule, or of whatever `rule` is, over these parameters."""
    if isinstance(rule, Optimizer):
        raise HyperError(
            f"give the class {type(rule).__name__} and its keywords, not an optimizer that was made already"
        )
    if isinstance(rule, Partition):
        if scope is not None:
            raise HyperError("scope is read from the rules of a partition: leave it out")
        pairs = [p if isinstance(p, tuple) else (names.get(id(p), ""), p) for p in params]
        return inner_around(Partitioned(rule, pairs, **keywords), None)
    if isinstance(rule, Rule | str | Path):
        rule = class_of(rule)
    if isinstance(rule, type) and not issubclass(rule, RuleOptimizer):
        _check_no_offload(keywords, rule.__name__)
    if not callable(rule):
        raise HyperError(
            f"an eager optimizer runs a rule, its name, a partition or a class of optimizers, not a "
            f"{type(rule).__name__}"
        )
    if isinstance(rule, type) and issubclass(rule, RuleOptimizer) and any(map(reads_layers, rule.interface.rules)):
        params = [(names[id(p)], p) if isinstance(p, Tensor) and id(p) in names else p for p in params]
    try:
        optimizer = rule(params, **keywords)
    except TypeError as error:
        if "'offload" in str(error):  # a function passes it on to a class that has no such keyword
            _check_no_offload(keywords, "what the function makes")
        raise
    if not isinstance(optimizer, Optimizer):
        raise HyperError(
            f"{rule!r} must make a torch.optim.Optimizer of the parameters, not a {type(optimizer).__name__}"
        )
    if not isinstance(optimizer, RuleOptimizer | Partitioned):
        _check_no_offload(keywords, type(optimizer).__name__)
    return inner_around(optimizer, scope)


def _check_no_offload(keywords: Mapping[str, Any], name: str) -> None:
    """HyperError where an offload is asked for, of an optimizer that is not of a rule."""
    if keywords.get("offload") is not None:
        raise HyperError(f"offload={keywords['offload']!r} is for rules, and {name} is none: leave it out")


def inner_around(optimizer: Optimizer, scope: Any) -> Inner:
    """An optimizer, run in parts."""
    if not isinstance(optimizer, RuleOptimizer | Partitioned):
        return ForeignInner(optimizer, scope)
    if scope is not None:
        raise HyperError(f"scope is read from the rule of {type(optimizer).__name__}: leave it out")
    inner: RuleInner | PartitionedInner = (
        RuleInner(optimizer, collects=True)
        if isinstance(optimizer, RuleOptimizer)
        else PartitionedInner(optimizer, collects=True)
    )
    for each in optimizer.optimizers if isinstance(optimizer, Partitioned) else [optimizer]:
        options = each._options
        if options.offload is not None:
            each._options = replace(options, offload=replace(options.offload, backward=True))
    return inner


class Frozen:
    """The entries of groups as they were; tensors by identity and version."""

    def __init__(self, groups: Groups) -> None:
        self._entries = _entries(groups)

    def changed(self, groups: Groups) -> str | None:
        """The name of an entry that is another now; None where all are as they were."""
        before, now = self._entries, _entries(groups)
        for (key, old), (same, new) in zip(before, now, strict=False):
            if key != same or not _equal(old, new):
                return key
        return None if len(before) == len(now) else (before + now)[-1][0]


def _entries(groups: Groups) -> list[tuple[str, Any]]:
    return [
        (key, (value, value._version) if isinstance(value, Tensor) else value)
        for group in groups
        for key, value in group.items()
        if key not in ("params", "param_names", FORMATS)  # formats come with the first states, in a backward pass
    ]


def _equal(old: Any, new: Any) -> bool:
    if isinstance(old, tuple) and len(old) == 2 and isinstance(old[0], Tensor):
        return isinstance(new, tuple) and old[0] is new[0] and old[1] == new[1]
    if old is new:
        return True
    try:
        return type(old) is type(new) and bool(old == new)
    except (TypeError, ValueError, RuntimeError):  # arrays, and the like: the same only where the same object
        return False
