"""Rules from sympy expressions of the values after one step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rulec.errors import RuleError
from rulec.language.check import check_direction_free_of_lr, check_elementwise, check_names, check_rule
from rulec.language.export.sympy import FromSympy
from rulec.language.expr.names import BASE_NAMES
from rulec.language.expr.node import Node, Op, node
from rulec.language.hyper import Hyper, Limits, well_known_range
from rulec.language.rule import Rule
from rulec.language.rule_data import State
from rulec.language.source import did_you_mean
from rulec.language.tracing.lines import Lines
from rulec.language.tracing.trace import Trace


def from_sympy(
    *, name: str, direction: Any = None, p: Any = None, state: Mapping[Any, Any] | None = None,
    hyper: Mapping[Any, Any] | None = None, init: Mapping[Any, Any] | None = None, summary: str = "",
) -> Rule:  # fmt: skip
    """The rule of sympy expressions for the values after one step.

    `direction`, or the new `p`, and in `state` the new value of each state are expressions of the values before the
    step. Their symbols are `g`, `p`, `t`, the states and the hyper-parameters, recognized by name. `hyper` gives each
    hyper-parameter's default, or a dict with `default` and range. `init` gives each state's first value, 0 by default:
    a number, an expression, or a dict with `init` and `per`.

    Raises RuleError for expressions outside the rule language.
    """
    if (direction is None) == (p is None):
        raise RuleError(f"{name} needs either direction or p: give one of them")
    hypers = {str(key): _hyper(name, str(key), value) for key, value in (hyper or {}).items()}
    starts = {str(key): value for key, value in (init or {}).items()}
    targets = {str(key): value for key, value in (state or {}).items()}
    if unknown := sorted(starts.keys() - targets.keys()):
        raise RuleError(f"{name} has no state {unknown[0]!r} to begin{did_you_mean(unknown[0], targets)}")
    reader = FromSympy({key: _name(key) for key in (*hypers, "p", *BASE_NAMES)})
    states = {key: _state(name, key, starts.get(key, 0), reader) for key in targets}
    check_names(Rule(name, (), hypers, states))
    trace = Trace(name, states, hypers)
    reader = FromSympy(
        {**{key: _name(key) for key in (*hypers, *BASE_NAMES)}, **{k: trace.read(k).node for k in targets}}
    )
    for key, value in targets.items():
        if reader.node(value) is not reader.names[key]:
            trace.assign(key, reader.node(value))
    trace.lines.append(("p" if direction is None else "direction", reader.node(p if direction is None else direction)))
    rule = Rule(name, tuple(Lines(trace).statements()), hypers, states, summary=summary)
    return check_direction_free_of_lr(check_rule(rule))


def _state(owner: str, key: str, entry: Any, reader: FromSympy) -> State:
    options = dict(entry) if isinstance(entry, Mapping) else {"init": entry}
    if unknown := sorted(options.keys() - {"init", "per"}):
        raise RuleError(f"state {key} of {owner} has no option {unknown[0]!r}: it has init and per")
    value = check_elementwise(reader.node(options.get("init", 0)), "an initial value", None)
    return State(value, per=str(options.get("per", "element")))


def _name(identifier: str) -> Node:
    return node(Op.NAME, identifier)


def _hyper(owner: str, key: str, entry: Any) -> Hyper:
    if not isinstance(entry, Mapping):
        entry = {"default": entry}
    known = ("default", *Limits.__annotations__)
    if unknown := sorted(set(entry) - set(known)):
        raise RuleError(f"{key} of {owner} has no {unknown[0]!r}{did_you_mean(unknown[0], known)}")
    numbers: dict[str, float] = {}
    for option, value in entry.items():
        try:
            numbers[option] = float(value)
        except (TypeError, ValueError):
            raise RuleError(f"{option} of {key} of {owner} is a number, not {value!r}") from None
    limits: Any = {k: v for k, v in numbers.items() if k != "default"} or well_known_range(key)
    return Hyper(numbers.get("default"), **limits)
