"""The classes themselves, made when first asked for."""

from __future__ import annotations

import functools
import inspect
from pathlib import Path
from typing import Any

import torch

from rulec.language.library import load, parse
from rulec.language.rule import Rule
from rulec.torch.documentation import class_doc
from rulec.torch.interface import Interface
from rulec.torch.library import library_index, rule_interface, torch_interface
from rulec.torch.optimizer import EvaluatedOptimizer, RuleOptimizer


def class_names() -> list[str]:
    """The names of all classes: torch's own for its rules, and one for every rule of the library."""
    names, classes = library_index()
    return sorted({*names, *classes})


@functools.cache
def class_named(name: str) -> type[RuleOptimizer]:
    """The class of that name; KeyError where there is none."""
    names, classes = library_index()
    torch_has_it = name in classes and hasattr(torch.optim, name)
    interface = torch_interface(name) if torch_has_it else rule_interface(load(names[name]))
    return _make(interface)


def optimizer(rule: Rule | str | Path) -> type[RuleOptimizer]:
    """The optimizer class of a rule, a library name (`"lion"`) or the path of a rule file.

    Its keywords are `lr` and the rule's other hyper-parameters; `beta1`, `beta2`, ... are one tuple, `betas`. Rules
    that are equal have one class. `optimizer("adamw")` is the class of torch's name, with torch's keywords.
    """
    if isinstance(rule, Rule):
        text = rule.to_yaml()
        _rules.setdefault(text, rule)
        return _of_text(text)
    loaded = load(rule)
    if loaded.name in class_names() and loaded.path == load(library_index()[0].get(loaded.name, rule)).path:
        return class_named(loaded.name)
    return optimizer(loaded)


#: The rules that classes were asked for, by their text: lines of these know the files that they are from.
_rules: dict[str, Rule] = {}


@functools.cache
def _of_text(text: str) -> type[RuleOptimizer]:
    return _make(rule_interface(_rules.get(text) or parse(text), source=text))


def _make(interface: Interface) -> type[RuleOptimizer]:
    def __init__(self: RuleOptimizer, params: Any, *args: Any, **keywords: Any) -> None:
        RuleOptimizer.__init__(self, params, *args, **keywords)

    receiver = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = [receiver, *interface.signature.parameters.values()]
    __init__.__signature__ = inspect.Signature(parameters, return_annotation=None)  # type: ignore[attr-defined]
    __init__.__annotations__ = {p.name: p.annotation for p in parameters[1:]} | {"return": None}
    body: dict[str, Any] = {"__init__": __init__, "__module__": "rulec.torch", "interface": interface}
    if interface.source:
        body["__reduce_ex__"] = _reduce
    base = EvaluatedOptimizer if interface.evaluates else RuleOptimizer
    kind = type(interface.name, (base,), body)
    kind.__doc__ = class_doc(interface)
    return kind


def _reduce(self: RuleOptimizer, protocol: Any) -> Any:
    """Pickles an optimizer whose class cannot be imported, by the text of its rule."""
    return _empty, (type(self).interface.source,), self.__getstate__()


def _empty(text: str) -> RuleOptimizer:
    kind = _of_text(text)
    return kind.__new__(kind)
