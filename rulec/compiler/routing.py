"""The choice of a rule for each tensor, by `applies_to` and `otherwise`."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Generic

from rulec.compiler.foreseen import decide
from rulec.compiler.view import matrix_view
from rulec.errors import RuleError
from rulec.language.evaluations import standalone
from rulec.language.expr.node import Op, const, rewrite, walk
from rulec.language.rule_data import AnyRule, RuleData


def applies(rule: RuleData, shape: Sequence[int], tags: Collection[str]) -> bool:
    """Whether a rule applies to a tensor of this shape with these tags."""
    if rule.applies_to is None:
        return True
    words = {n for n in walk([rule.applies_to]) if n.op is Op.FACT and str(n.arg).startswith("tagged(")}
    values = {n: const(float(str(n.arg)[8:-2] in tags)) for n in words}
    condition = rewrite([rule.applies_to], lambda n: values.get(n, n))[0]
    return bool(decide(condition, matrix_view(shape, rule.view).facts))


class Router(Generic[AnyRule]):
    """A rule and the rules under its `otherwise`, each as it runs by itself."""

    def __init__(self, rule: AnyRule) -> None:
        self.rule = rule
        self.rules = [standalone(routed) for routed in _chain(rule)]

    def choose(self, shape: Sequence[int], tags: Collection[str], name: str = "a tensor") -> AnyRule:
        """The first rule that applies; RuleError where none does."""
        for rule in self.rules:
            if applies(rule, shape, tags):
                return rule
        raise RuleError(
            f"{self.rule.name} does not apply to {name}, of shape {tuple(shape)}, and names no rule for it: "
            f"say otherwise, or leave it out"
        )

    @property
    def states(self) -> set[str]:
        """The names of the states of all the rules."""
        return {state for rule in self.rules for state in rule.state}


def route(rule: AnyRule, shape: Sequence[int], tags: Collection[str] = ()) -> AnyRule:
    """The rule for a tensor of this shape with these tags, as it runs by itself. RuleError where no rule applies."""
    return Router(rule).choose(shape, tags)


def written_for(rule: AnyRule, shape: Sequence[int], tags: Collection[str] = ()) -> AnyRule:
    """The rule that `route` chooses, as it is written: with its passes. RuleError where no rule applies."""
    chosen = route(rule, shape, tags)
    return next((each for each in _chain(rule) if applies(each, shape, tags)), chosen)


def _chain(rule: AnyRule) -> Iterator[AnyRule]:
    current: AnyRule | None = rule
    while current is not None:
        yield current
        current = current.rest
