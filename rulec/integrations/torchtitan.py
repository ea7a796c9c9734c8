"""torchtitan's `OptimizersContainer` with rules of rulec for optimizers, and its flat optimizer states."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from rulec.errors import HyperError
from rulec.integrations.from_rule import class_and_keywords
from rulec.torch.optimizer import RuleOptimizer

#: What an `optimizer_name` of a rule begins with.
PREFIX = "rulec:"


@functools.cache
def optimizers_container() -> Any:
    """A class beside torchtitan's `OptimizersContainer`, with a `Config` of the same fields.

    An `optimizer_name` such as `"rulec:muon"` or `"rulec:clip_by_global_norm >> adamw"` is a rule, and all other names
    are torchtitan's. With `implementation="fused_opt_states_bf16"` a rule's states are bfloat16; `"fused"`,
    `"foreach"` and `"for-loop"` change nothing of a rule, whose step is one kernel. Groups have the names of
    parameters, and tags are read from names. States are flat by names, as torchtitan saves them.
    """
    from torchtitan.components.optimizer import OptimizersContainer

    class RuleOptimizersContainer(OptimizersContainer):  # type: ignore[misc]
        """torchtitan's container, where a name may be a rule."""

        @dataclass(kw_only=True, slots=True)
        class Config(OptimizersContainer.Config):  # type: ignore[misc]
            """torchtitan's fields."""

        def __init__(self, config: Any, *, model_parts: list[torch.nn.Module]) -> None:
            super().__init__(_with_dtypes(config), model_parts=model_parts)

        @staticmethod
        def _resolve_optimizer_factory(name: str) -> Callable[..., torch.optim.Optimizer]:
            if name.startswith(PREFIX):
                return functools.partial(_optimizer, name.removeprefix(PREFIX).strip())
            factory: Callable[..., torch.optim.Optimizer] = OptimizersContainer._resolve_optimizer_factory(name)
            return factory

    return RuleOptimizersContainer


def _with_dtypes(config: Any) -> Any:
    """The configuration with states in bfloat16 for rules, where it asks for them."""
    if config.implementation != "fused_opt_states_bf16":
        return config
    by_name = {name: dict(keywords) for name, keywords in config.optimizer_factory_kwargs_by_name.items()}
    for group in config.param_groups:
        if group.optimizer_name.startswith(PREFIX):
            keywords = by_name.setdefault(group.optimizer_name, {})
            if keywords.setdefault("state_dtype", torch.bfloat16) != torch.bfloat16:
                raise HyperError(
                    f"implementation='fused_opt_states_bf16' and state_dtype={keywords['state_dtype']!r} of "
                    f"{group.optimizer_name} say different things: leave one out"
                )
    return replace(config, optimizer_factory_kwargs_by_name=by_name)


def _optimizer(rule: str, groups: list[dict[str, Any]], **keywords: Any) -> RuleOptimizer:
    """The optimizer of a rule over torchtitan's groups, that have all of its hyper-parameters."""
    kind, keywords = class_and_keywords(rule, keywords)
    known = kind.interface.signature.parameters
    return kind([_hinted(group, known) for group in groups], **keywords)


def _hinted(group: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """A group without the hints of torchtitan's implementation that the class does not have."""
    return {key: value for key, value in group.items() if key in known or key not in ("fused", "foreach")}
