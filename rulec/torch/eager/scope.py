"""Rules for updates inside the backward pass: they need nothing but the tensor and its gradient."""

from __future__ import annotations

from typing import Any, Literal, get_args
from weakref import WeakKeyDictionary

import torch
from torch.optim import Optimizer

from rulec.analysis.flow import flow_of
from rulec.analysis.structure import scope_of
from rulec.errors import HyperError, RuleError
from rulec.language.evaluations import check_single
from rulec.language.rule import Rule
from rulec.torch.lbfgs import LBFGS
from rulec.torch.optimizer import RuleOptimizer
from rulec.torch.partitioned import Partitioned
from rulec.torch.tensors.dtensor import is_split, sees_more

#: The scopes that a foreign optimizer may declare for its update of one element.
Scope = Literal["elementwise", "tensor"]

#: The scopes of updates that need values of several tensors.
_JOINED = ("group", "model")

_SCOPES: WeakKeyDictionary[Rule, str] = WeakKeyDictionary()


def rules_of(optimizer: RuleOptimizer | Partitioned) -> list[Rule]:
    """The rules that the parameters of an optimizer go to."""
    return [*{id(route.rule): route.rule for route in optimizer.routing()}.values()]


def scope_of_rule(rule: Rule) -> str:
    """The scope on which the update of one element depends: `elementwise`, `tensor`, `group` or `model`."""
    return scope_of(flow_of(rule))


def check_rules(optimizer: RuleOptimizer, collects: bool) -> None:
    """RuleError where a parameter's rule cannot be run inside the backward pass.

    An optimizer that `collects` gradients takes one step of all, if need be.
    """
    for rule in rules_of(optimizer):
        check_single(rule, "an update inside the backward pass")
        if rule.inputs:
            raise RuleError(
                f"{rule.name} takes the input {min(rule.inputs)!r} at every step, which is not there inside the "
                f"backward pass: use the optimizer itself"
            )
        scope = scope_of_rule(rule)
        if scope in _JOINED and not collects:
            raise RuleError(
                f"{rule.name} needs a value of the whole {scope} for the update of one tensor, and inside the backward "
                f"pass other gradients are still to come: use the optimizer itself, or, where the value is the norm "
                f"that gradients are clipped by, the rule without it and max_grad_norm="
            )


def joined_places(optimizer: RuleOptimizer) -> frozenset[int]:
    """The indices of parameters whose update needs values of other parameters: all of them, or none."""
    routes = optimizer.routing()
    joins = any(scope_of_rule(rule) in _JOINED for rule in rules_of(optimizer))
    return frozenset(route.place for route in routes if joins)


def meeting_places(optimizer: RuleOptimizer) -> frozenset[int]:
    """The indices of parameters whose update waits for other ranks: with shards of them, or of `reduce_over`."""
    options = optimizer._options
    across = joined_places(optimizer) if options.across is not None else frozenset[int]()
    if options.coordinator is None:
        return across
    routes = optimizer.routing()
    return across | {route.place for route in routes if is_split(route.param) and sees_more(route.rule)}


def check_declared(optimizer: Optimizer, scope: Any) -> None:
    """HyperError or RuleError where a foreign optimizer does not say that each tensor's update is its own."""
    name = type(optimizer).__name__
    if isinstance(optimizer, LBFGS | torch.optim.LBFGS):
        raise RuleError("LBFGS needs all gradients at once, several times in a step: use the optimizer itself")
    if scope not in get_args(Scope):
        raise HyperError(
            f"what {name} computes is not known here: say scope='elementwise' or scope='tensor' where its update of "
            f"one tensor depends on no other, else use the optimizer itself"
        )
