"""Routing: the rule for tensors outside a rule's `applies_to`."""

from __future__ import annotations

from dataclasses import replace

from rulec.language.hyper import Hyper
from rulec.language.node import Node, names_in
from rulec.language.rule import Rule


def rest_rule(rule: Rule) -> Rule | None:
    """The rule for the tensors that `rule` leaves out; None where `rule` has no `otherwise`.

    A hyper-parameter of both is one, with the main rule's default. A hyper-parameter under a new name, as in
    `{adamw: {lr: adamw_lr}}`, stays apart.
    """
    rest = None if rule.otherwise is None else rule.otherwise.rule
    if rest is None:
        return None
    main, hyper = rule.hyper_with_rate, rest.hyper_with_rate
    for key in [*hyper]:
        default = main[key].default if key in main else None
        if default is not None:
            hyper[key] = replace(hyper[key], default=default)
        for needed in names_in([default]) if isinstance(default, Node) else ():
            if needed in main:
                hyper.setdefault(needed, main[needed])
    return replace(rest, hyper=hyper)


def all_hyper(rule: Rule) -> dict[str, Hyper]:
    """The hyper-parameters of a rule and of all rules under its `otherwise`: those a user may set."""
    rest = rule.rest
    if rest is None:
        return dict(rule.hyper)
    main = rule.hyper_with_rate
    return main | {key: hyper for key, hyper in all_hyper(rest).items() if key not in main}
