"""What optax.inject_hyperparams takes for hyper-parameters: those of the rule by their names, and nothing else."""

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
    """A signature that binds keywords which a function gathers as parameters of their own."""

    def bind(self, *args: Any, **keywords: Any) -> inspect.BoundArguments:
        """The arguments with defaults, those that are no hyper-parameters as `_Fixed`."""
        given = super().bind(*args, **keywords)
        last = next(p.name for p in self.parameters.values() if p.kind is inspect.Parameter.VAR_KEYWORD)
        hyper = given.arguments.get(last, {})
        parameters = [p for p in self.parameters.values() if p.name != last]
        parameters += [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in hyper]
        found = inspect.Signature(parameters).bind(*args, **keywords)
        found.apply_defaults()
        numbers = {"lr", *hyper} - {*_static(_bare(found.arguments["rule"]))}
        for name, value in found.arguments.items():
            if name not in numbers:
                found.arguments[name] = _Fixed(_bare(value))
        return found


def _static(rule: Rules) -> Iterator[str]:
    """The hyper-parameters that decide what is compiled."""
    for own in rules_of(rule):
        yield from (name for name, setting in Group(own, {}).settings.items() if setting.static)


def _bare(value: Any) -> Any:
    return value.value if isinstance(value, _Fixed) else value


def injectable(function: Callable[_Given, _Made]) -> Callable[_Given, _Made]:
    """The function of a `rule` and its hyper-parameters, `lr` and what it gathers, for optax to inject these."""

    @functools.wraps(function)
    def called(*args: _Given.args, **keywords: _Given.kwargs) -> _Made:
        bare: dict[str, Any] = {name: _bare(value) for name, value in keywords.items()}
        return function(*map(_bare, args), **bare)

    called.__signature__ = _Signature([*inspect.signature(function).parameters.values()])  # type: ignore[attr-defined]
    return called
