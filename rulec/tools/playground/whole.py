"""The rule that is shown and run for a rule: a wrapper goes around rules of the library."""

from __future__ import annotations

from rulec.language.library.load import load
from rulec.language.rule import Rule


def partners(rule: Rule) -> list[str]:
    """The names of the rules that a wrapper goes around; empty for other rules."""
    return ["adam", "sgd", *rule.wraps][: len(rule.wraps)]


def whole(rule: Rule) -> Rule:
    """The rule itself, or the wrapper around its partners."""
    return rule(*map(load, partners(rule))) if rule.wraps else rule
