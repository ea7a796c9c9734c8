"""Optimizers by the text of their rule, for trainers that are configured by the path of a class and its keywords."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from rulec.errors import HyperError
from rulec.language.rule import Rule
from rulec.torch.classes import class_named, class_names, optimizer
from rulec.torch.optimizer import RuleOptimizer

Rules = Rule | str | type[RuleOptimizer]


def from_rule(
    params: ParamsT, rule: str, lr: float | None = None, hyper: dict[str, Any] | None = None, auto: bool | None = None
) -> Optimizer:
    """The optimizer of a rule: a name, a class's name, the path of a rule file, or a composition of these.

    `from_rule(model.parameters(), "clip_by_global_norm >> adamw", lr=1e-3, hyper={"max_norm": 1.0})`. `hyper` has all
    keywords of the rule's class but `lr`, and `auto` says whether a rule for hidden matrices, such as Muon, tags
    parameters itself, as it does by default.
    """
    keywords = {**(hyper or {}), **({} if lr is None else {"lr": lr})}
    if auto is not None:
        keywords["auto"] = auto
    kind, keywords = class_and_keywords(rule, keywords)
    return kind(params, **keywords)


def class_and_keywords(rule: Rules, keywords: Mapping[str, Any]) -> tuple[type[RuleOptimizer], dict[str, Any]]:
    """The class of a rule, and its keywords; one that asks for tags finds them itself, unless `auto` says otherwise.

    HyperError for a keyword that the class does not have.
    """
    kind = class_of(rule)
    known = kind.interface.signature.parameters
    keywords = kind.interface.in_own_words(keywords, "")
    for key in keywords:
        if key not in known:
            raise HyperError(f"{kind.__name__} has no keyword {key!r}{kind.interface.suggestion(key)}")
    return kind, {**({"auto": True} if "auto" in known else {}), **keywords}


def class_of(rule: Rules) -> type[RuleOptimizer]:
    """The class of a rule, of its text, or of a class's name; a class is itself."""
    if isinstance(rule, type):
        return rule
    return class_named(rule) if isinstance(rule, str) and rule in class_names() else optimizer(rule)
