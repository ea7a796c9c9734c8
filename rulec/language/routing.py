"""Routing: the rule that a tensor goes to which the main one does not apply to."""

from __future__ import annotations

from dataclasses import replace

from rulec.language.hyper import DEFAULT_LR, Hyper, well_known_range
from rulec.language.node import Node, names_in
from rulec.language.rule import Rule


def with_rate(rule: Rule) -> dict[str, Hyper]:
    """The hyper-parameters of a rule, and the learning rate that it has without saying so."""
    hyper = dict(rule.hyper)
    if not rule.assigns_parameter and not rule.wraps and hyper.get("lr", Hyper(None)).default is None:
        hyper["lr"] = replace(hyper.get("lr", Hyper(None, **well_known_range("lr"))), default=DEFAULT_LR)
    return hyper


def rest_rule(rule: Rule) -> Rule | None:
    """The rule for the tensors that `rule` leaves out; None where it names none.

    A hyper-parameter that both have is one: it has the main rule's default. One that was bound to a name of its own,
    as in `{adamw: {lr: adamw_lr}}`, stays apart.
    """
    rest = None if rule.otherwise is None else rule.otherwise.rule
    if rest is None:
        return None
    main, hyper = with_rate(rule), with_rate(rest)
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
    own = with_rate(rule)
    return own | {key: hyper for key, hyper in all_hyper(rest).items() if key not in own}
