"""The signature by which optax.inject_hyperparams knows the hyper-parameters: the rule's, by name, and nothing else."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from rulec.jax.recipe import Group, Rules, rules_of

_Given = ParamSpec("_Given")
_Made = TypeVar("_Made")


@dataclass(frozen=True, eq=False)
class _Fixed:
    """An argument that is no hyper-parameter, although it can be called, or is a number."""

    value: Any


class _Signature(inspect.Signature):
    """A signature that binds each gathered keyword (`**hyper`) as a parameter."""

    def bind(self, *args: Any, **keywords: Any) -> inspect.BoundArguments:
        """The arguments with defaults; all but hyper-parameters are wrapped in `_Fixed`."""
        gathered = super().bind(*args, **keywords)
        last = next(p.name for p in self.parameters.values() if p.kind is inspect.Parameter.VAR_KEYWORD)
        hyper = gathered.arguments.get(last, {})
        parameters = [p for p in self.parameters.values() if p.name != last]
        parameters += [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in hyper]
        bound = inspect.Signature(parameters).bind(*args, **keywords)
        bound.apply_defaults()
        numbers = {"lr", *hyper} - {*_static(_bare(bound.arguments["rule"]))}
        for name, value in bound.arguments.items():
            if name not in numbers:
                bound.arguments[name] = _Fixed(_bare(value))
        return bound


def _static(rule: Rules) -> Iterator[str]:
    """The names of the static hyper-parameters: other values of these compile anew."""
    for part in rules_of(rule):
        yield from (name for name, setting in Group(part, {}).settings.items() if setting.static)


def _bare(value: Any) -> Any:
    return value.value if isinstance(value, _Fixed) else value


def injectable(function: Callable[_Given, _Made]) -> Callable[_Given, _Made]:
    """The function with a signature by which optax injects its hyper-parameters: `lr` and the gathered keywords.

    Its first parameter must be `rule`.
    """

    @functools.wraps(function)
    def called(*args: _Given.args, **keywords: _Given.kwargs) -> _Made:
        bare: dict[str, Any] = {name: _bare(value) for name, value in keywords.items()}
        return function(*map(_bare, args), **bare)

    called.__signature__ = _Signature([*inspect.signature(function).parameters.values()])  # type: ignore[attr-defined]
    return called
