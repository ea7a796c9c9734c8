"""The options of a rule written in Python that are keys of a rule file, read as in a file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rulec.errors import RuleError
from rulec.language.check import check_elementwise
from rulec.language.compose.cases import with_inputs_of_rest
from rulec.language.dimensions import Dimensions
from rulec.language.eval_point import check_evaluation
from rulec.language.expr.names import name_problem
from rulec.language.expr.node import Node, const, names_in
from rulec.language.inputs import WORDS, InputKind, kind_of
from rulec.language.library.load import load
from rulec.language.parse.expression import parse_expression, tagged
from rulec.language.parse.located import Text
from rulec.language.rule import Rule
from rulec.language.rule_data import Routing, Statistic
from rulec.language.source import Source, did_you_mean
from rulec.language.statistics import names_of, parsed
from rulec.language.variants import with_variants

__all__ = [
    "FACTS_OF_SHAPE", "WHOLE", "check_mappings", "dimensions_of", "expression_of", "extents_of", "input_kinds",
    "varied", "with_statistics", "with_whole", "wrapped_names",
]  # fmt: skip

#: The options about a rule as a whole.
WHOLE = ("rate", "evaluate", "skip", "applies_to", "otherwise")

#: The shape facts that are known where tensors are routed and states are allocated.
FACTS_OF_SHAPE = ("ndim", "numel", "rows", "cols")

_PAPER = ("title", "authors", "year", "url")

#: Option -> the words that its entries may be; for `view`, by key.
_VIEW = {"flatten": "rest", "short": "first"}


def check_mappings(rule_name: str, options: Mapping[str, Any]) -> None:
    """RuleError for an option that is no dict, or has another key or value than in a rule file."""
    for option, value in options.items():
        if value is not None and not isinstance(value, Mapping):
            raise RuleError(f"{option} of {rule_name} is a dict, not {value!r}")
    paper, inputs, view = (options[key] or {} for key in ("paper", "inputs", "view"))
    if unknown := sorted(map(str, paper.keys() - set(_PAPER))):
        raise RuleError(f"paper of {rule_name} has no {unknown[0]!r}: it has {', '.join(_PAPER)}")
    for key, value in paper.items():
        wanted = int if key == "year" else str
        if not isinstance(value, wanted):
            raise RuleError(f"{key} of the paper of {rule_name} is of type {wanted.__name__}, not {value!r}")
    for key, value in inputs.items():
        if value not in WORDS and not (isinstance(value, Mapping) and [*value] == ["shape"]):
            raise RuleError(
                f"the input {key} of {rule_name} is 'scalar', 'like p' or dict(shape=[rows, columns]), not {value!r}"
            )
    for key, value in view.items():
        if key not in _VIEW:
            hint = did_you_mean(str(key), _VIEW) or f": it has {' and '.join(_VIEW)}"
            raise RuleError(f"view of {rule_name} has no {key!r}{hint}")
        if value != _VIEW[key]:
            raise RuleError(f"{key} of the view of {rule_name} is {_VIEW[key]!r}, not {value!r}")


def expression_of(
    what: str, value: Any, known: list[str], tags: bool = False, variables: Mapping[str, int] | None = None
) -> Node:  # fmt: skip
    """The number or expression of an option; RuleError with `what`, its name, in the message."""
    if isinstance(value, int | float) and not isinstance(value, bool) and value == value:
        return const(value)
    if not isinstance(value, str):
        raise RuleError(f"{what} is an expression in quotes, not {value!r}")
    try:
        return parse_expression(Text(value, Source("", value)), known, tagged if tags else None, variables=variables)
    except RuleError as error:
        raise RuleError(f"{what} is {value!r}: {error.message}") from None


def dimensions_of(rule_name: str, applies_to: Any) -> Dimensions:
    """The numbers of dimensions of a rule's tensors, by the text of its condition on tensors."""
    if applies_to is None:
        return Dimensions()
    return Dimensions(expression_of(f"applies_to of {rule_name}", applies_to, [*FACTS_OF_SHAPE], tags=True))


def extents_of(
    owner: str, shape: Any, known: list[str], variables: Mapping[str, int] | None = None
) -> tuple[Node, ...]:  # fmt: skip
    """The rows and columns of a shape; RuleError in a sentence about its owner."""
    if not (isinstance(shape, list | tuple) and len(shape) == 2):
        raise RuleError(f"the shape of {owner} is a list of two extents, rows and columns, not {shape!r}")
    return tuple(expression_of(f"an extent of {owner}", x, known, variables=variables) for x in shape)


def input_kinds(rule_name: str, inputs: Mapping[str, Any], known: list[str]) -> dict[str, InputKind]:
    """The inputs of a rule with their kinds; RuleError for an extent that is no expression of the names `known`."""
    return {
        key: entry
        if isinstance(entry, str)
        else kind_of(extents_of(f"input {key} of {rule_name}", entry["shape"], known))
        for key, entry in inputs.items()
    }


def wrapped_names(rule_name: str, wraps: Any) -> tuple[tuple[str, ...], Any]:
    """A wrapper's names for what it wraps, and the shape of the call's input; None for the parameter's."""
    if not isinstance(wraps, Mapping):
        return ((wraps,) if isinstance(wraps, str) else tuple(wraps)), None
    if len(wraps) != 1:
        raise RuleError(f"wraps of {rule_name} gives a shape to one rule, not to {len(wraps)}")
    ((call, entry),) = wraps.items()
    if not isinstance(entry, Mapping) or [*entry] != ["shape"]:
        raise RuleError(f'wraps of {rule_name} is {{{call!r}: {{"shape": [rows, cols]}}}}, not {{{call!r}: {entry!r}}}')
    return (call,), entry["shape"]


def with_whole(rule: Rule, options: Mapping[str, Any]) -> Rule:
    """The rule with the options of `WHOLE`. Raises RuleError in a sentence."""
    values = [*FACTS_OF_SHAPE, "machine_eps", *rule.hyper]
    if "rate" in options:
        rule = replace(rule, rate=_rate(rule, options["rate"]))
    known = {
        "evaluate": ["p", *values, *rule.state],
        "skip": ["p", "t", "g", "grad", *values, *rule.state, *rule.inputs],
        "applies_to": [*FACTS_OF_SHAPE],
    }
    for key in [key for key in known if key in options]:
        what = f"{key} of {rule.name}"
        value = expression_of(what, options[key], known[key], tags=key == "applies_to")
        if key != "skip":
            check_elementwise(value, what, None)
        attribute: dict[str, Any] = {key: value}
        rule = replace(rule, **attribute)
    if "otherwise" in options:
        rule = with_inputs_of_rest(replace(rule, otherwise=_routing(rule, options["otherwise"])))
    return check_evaluation(rule, None)


def with_statistics(rule: Rule, called: Mapping[str, Statistic], texts: Mapping[str, Any]) -> Rule:
    """The rule with statistics of its texts, and with those of called rules where it has their names."""
    known = {*names_of(rule)}
    kept = {key: each for key, each in called.items() if known >= {*names_in([each.value])}}
    for key, text in texts.items():
        if not isinstance(text, str):
            raise RuleError(f"the statistic {key} of {rule.name} is an expression in quotes, not {text!r}")
        if problem := name_problem(key):
            raise RuleError(f"a statistic of {rule.name}: {problem}")
        try:
            kept[key] = parsed(rule, key, Text(text, Source("", text)))
        except RuleError as error:
            raise RuleError(f"the statistic {key} of {rule.name} is {text!r}: {error.message}") from None
    return replace(rule, statistics=kept)


def varied(rule: Rule, variants: Any) -> Rule:
    """The rule with the variants of an option. Raises RuleError in a sentence."""
    if variants is None:
        return rule
    if not isinstance(variants, Mapping):
        raise RuleError(f"variants of {rule.name} is a dict, not {variants!r}")
    for key, values in variants.items():
        if not isinstance(values, list | tuple) or not values:
            raise RuleError(f"the variants of {key} of {rule.name} are a list of values, not {values!r}")
    return with_variants(rule, variants, lambda key, index, make: make())


def _rate(rule: Rule, value: Any) -> Node:
    """The learning rate of a rule with a direction."""
    if rule.wraps:
        raise RuleError(f"{rule.name} has the learning rate of the rule it wraps: leave rate out")
    if rule.assigns_parameter:
        raise RuleError(f"{rule.name} assigns p itself, so its rate has no meaning: leave it out")
    what = f"rate of {rule.name}"
    return check_elementwise(expression_of(what, value, [*rule.hyper, "lr"]), what, None)


def _routing(rule: Rule, entry: Any) -> Routing:
    """The rule for tensors outside `applies_to`: a Rule, the name of one, or one of the rules that are wrapped."""
    if rule.applies_to is None:
        raise RuleError("otherwise is for the tensors that applies_to leaves out: say applies_to too")
    if isinstance(entry, str) and entry in rule.wraps:
        return Routing(None, entry)
    if not isinstance(entry, Rule | str):
        raise RuleError(f"otherwise of {rule.name} is a rule or the name of one, not {entry!r}")
    rest = load(entry) if isinstance(entry, str) else entry
    if rest.wraps and not rule.wraps:
        raise RuleError(f"{rest.name} wraps another rule: write {rest.called}(adam)")
    is_named = isinstance(entry, str) and not re.search(r"\.ya?ml\b", entry)
    return Routing(rest, str(entry) if is_named else "")
