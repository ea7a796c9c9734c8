"""Routing: the rule that a tensor goes to which the main one does not apply to."""

from __future__ import annotations

from dataclasses import replace

from rulec.language.hyper import Hyper
from rulec.language.node import Node, names_in
from rulec.language.rule import Rule


def rest_rule(rule: Rule) -> Rule | None:
    """The rule for the tensors that `rule` leaves out; None where it names none.

    A hyper-parameter that both have is one: it has the main rule's default. One that was bound to a name of its own,
    as in `{adamw: {lr: adamw_lr}}`, stays apart.
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
    """The hyper-parameters of a rule and of all that it routes tensors to: what a user may set."""
    rest = rule.rest
    if rest is None:
        return dict(rule.hyper)
    own = rule.hyper_with_rate
    return own | {key: hyper for key, hyper in all_hyper(rest).items() if key not in own}
