"""Rules written as Python functions: traced once, with values that record the operations on them.

The function's source is never read. Its local names are read while it runs, so the lines of a traced rule have the
author's names.
"""

from __future__ import annotations

import inspect
import linecache
import math
import re
from collections.abc import Callable, Mapping
from numbers import Real
from pathlib import Path
from types import FunctionType
from typing import Any, cast, overload

from rulec.errors import RuleError
from rulec.language.author import foreign_error
from rulec.language.check import (
    check_direction_free_of_lr,
    check_elementwise,
    check_names,
    check_rule,
    storage_problem,
    with_storage,
)
from rulec.language.expression import parse_expression
from rulec.language.located import Text
from rulec.language.names import RESERVED
from rulec.language.node import FACTS, Node, const, name
from rulec.language.rule import Hyper, Limits, Rule, State, well_known_range
from rulec.language.source import Source, Span, did_you_mean, rule_error
from rulec.language.trace import Inner, Lines, States, Trace, call_rule
from rulec.language.value import Value, as_traced, current, operation, record

__all__ = ["Value", "call_rule", "operation", "record", "rule"]

_ARGUMENTS = ("g", "grad", "p", "t", "s")
_OPTIONS = ("state", "storage", "hyper", "name", "assigns", "wraps", "paper")
_PAPER = ("title", "authors", "year", "url")


@overload
def rule(function: Callable[..., Any], /) -> Rule: ...
@overload
def rule(
    *, state: Mapping[str, Any] | None = None, storage: Mapping[str, str] | None = None,
    hyper: Mapping[str, Mapping[str, Any]] | None = None, name: str | None = None, assigns: str = "direction",
    wraps: str = "", paper: Mapping[str, Any] | None = None,
) -> Callable[[Callable[..., Any]], Rule]: ...  # fmt: skip


def rule(function: Callable[..., Any] | None = None, /, **options: Any) -> Any:
    """The rule of a Python function.

    The function takes any of `g` (gradient), `grad`, `p` (parameter), `t` (step, from 1), `s` (states as
    attributes), and hyper-parameters with defaults as keyword-only arguments. It returns the direction, or the new
    parameter where `assigns="p"`. `state` gives each state's initial value (a number, or an expression such as "p"),
    or a dict with `init` and `per`. `storage` names the states that stay float32: `storage=dict(x0="exact")`. `hyper`
    gives ranges: `hyper=dict(clip=dict(above=0))`. `name` is the rule's name, by default the function's in camel case;
    `paper` has any of `title`, `authors`, `year` and `url`.

    `wraps` makes the rule a wrapper: it names the argument for the wrapped rule. In the function, `inner(g)`, or
    `inner(g, t=t)`, is the wrapped rule's direction, and `inner.p` afterwards its new parameter.

    The function itself stays at `.function` and runs on NumPy arrays. Raises RuleError at the line of a mistake.
    """
    if unknown := sorted(options.keys() - set(_OPTIONS)):
        hint = did_you_mean(unknown[0], _OPTIONS) or f": it has {', '.join(_OPTIONS)}"
        raise RuleError(f"rulec.rule has no option {unknown[0]!r}{hint}")
    return (lambda f: _placed(f, options)) if function is None else _placed(function, options)


def _placed(function: Any, options: Mapping[str, Any]) -> Rule:
    """The rule of a function; an error without a place gets the function's first line."""
    if not inspect.isfunction(function):
        raise RuleError(f"rulec.rule makes a rule of a function, not of {function!r}")
    try:
        return _trace_rule(function, **options)
    except RuleError as error:
        if error.place:
            raise
        raise rule_error(error.message, definition(function)) from None


def definition(function: FunctionType) -> Span:
    """The place of a function's `def`, or of the line it stands in."""
    file, number = function.__code__.co_filename, function.__code__.co_firstlineno
    lines = linecache.getlines(file)[number - 1 : number + 100]
    offset = next((i for i, line in enumerate(lines) if re.match(r"\s*(async\s+)?def\b", line)), 0)
    text = lines[offset].rstrip("\n") if lines else ""
    indent = len(text) - len(text.lstrip())
    source = Source(file, "\n" * (number + offset - 1) + text)
    return Span(source, number + offset, indent + 1, max(1, len(text) - indent))


def _trace_rule(
    function: FunctionType, *, state: Mapping[str, Any] | None = None, storage: Mapping[str, str] | None = None,
    hyper: Mapping[str, Mapping[str, Any]] | None = None, name: str | None = None, assigns: str = "direction",
    wraps: str = "", paper: Mapping[str, Any] | None = None,
) -> Rule:  # fmt: skip
    rule_name = name or "".join(part[:1].upper() + part[1:] for part in function.__name__.split("_"))
    if assigns not in ("direction", "p"):
        raise RuleError(f"assigns is 'direction' or 'p', not {assigns!r}")
    for option, value in (("state", state), ("storage", storage), ("hyper", hyper), ("paper", paper)):
        if value is not None and not isinstance(value, Mapping):
            raise RuleError(f"{option} of {rule_name} is a dict, not {value!r}")
    if unknown := sorted(map(str, (paper or {}).keys() - set(_PAPER))):
        raise RuleError(f"paper of {rule_name} has no {unknown[0]!r}: it has {', '.join(_PAPER)}")
    for key, value in (paper or {}).items():
        wanted = int if key == "year" else str
        if not isinstance(value, wanted):
            raise RuleError(f"{key} of the paper of {rule_name} is of type {wanted.__name__}, not {value!r}")
    positional, hypers = _signature(function, rule_name, hyper or {}, wraps)
    if wraps and wraps not in positional:
        raise RuleError(f"{rule_name} wraps {wraps!r}, and its function has no such argument: add it before *")
    states = {key: _state(rule_name, key, value, hypers) for key, value in (state or {}).items()}
    check_names(Rule(rule_name, (), hypers, states, wraps=wraps))
    trace = Trace(rule_name, states, hypers, wraps, function.__code__)
    result = _run(function, trace, positional, hypers)
    trace.lines.append((assigns, _result(result, rule_name, assigns)))
    traced = Rule(
        rule_name,
        step=tuple(Lines(trace).statements()),
        hyper=trace.hyper,
        state=trace.state,
        inputs=trace.inputs,
        summary=(inspect.getdoc(function) or "").partition("\n")[0],
        paper=paper or {},
        view=trace.view,
        wraps=wraps,
        path=Path(function.__code__.co_filename),
        function=function,
    )
    return _stored(check_direction_free_of_lr(check_rule(traced)), storage or {})


def _stored(rule: Rule, words: Mapping[str, str]) -> Rule:
    """The rule with the states in `words` marked."""
    for key, word in words.items():
        if problem := storage_problem(rule, str(key), word):
            raise RuleError(problem)
        rule = with_storage(rule, key, word)
    return rule


def _result(result: Any, rule_name: str, assigns: str) -> Node:
    if result is None:
        raise RuleError(f"the function of {rule_name} returns nothing: return the {assigns}")
    if not isinstance(result, Value | int | float) or isinstance(result, bool):
        kind = type(result).__name__
        raise RuleError(f"the function of {rule_name} returns a value of type {kind}: return one value, the {assigns}")
    return as_traced(result)


def _run(function: Callable[..., Any], trace: Trace, positional: list[str], hypers: Mapping[str, Hyper]) -> Any:
    values: dict[str, Any] = {key: Value(name(key)) for key in (*positional, *hypers)}
    if "s" in values:
        values["s"] = States(trace)
    if trace.wraps:
        values[trace.wraps] = inner = Inner(trace)
    token = current.set(trace)
    try:
        result = function(*(values[key] for key in positional), **{key: values[key] for key in hypers})
        trace.name_locals()
        if trace.wraps and not inner.called:
            raise RuleError(
                f"{trace.wraps} is never called: write {trace.wraps}(g) in the function of {trace.rule_name}"
            )
        return result
    except (TypeError, AttributeError, ArithmeticError) as error:
        raise foreign_error(error, function.__code__) or error from error
    finally:
        current.reset(token)


def _state(rule_name: str, key: str, entry: Any, hypers: Mapping[str, Hyper]) -> State:
    options = dict(entry) if isinstance(entry, Mapping) else {"init": entry}
    if unknown := sorted(options.keys() - {"init", "per"}):
        raise RuleError(f"state {key} of {rule_name} has no option {unknown[0]!r}: it has init and per")
    init, per = options.get("init", 0), options.get("per", "element")
    if isinstance(init, str):
        return State(_initial(rule_name, key, init, [*hypers, "p", *FACTS]), per=str(per))
    number = _number(init)
    if number is None:
        raise RuleError(f"state {key} of {rule_name} begins as a number or an expression in quotes, not as {init!r}")
    return State(const(number), per=str(per))


def _number(value: Any) -> float | None:
    """A plain number of any kind as a float; None for NaN, for a number too large for float64, and for all else."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return None if math.isnan(number) else number


def _initial(rule_name: str, key: str, init: str, known: list[str]) -> Node:
    try:
        return check_elementwise(parse_expression(Text(init, Source("", init)), known), "an initial value", None)
    except RuleError as error:
        raise RuleError(f"state {key} of {rule_name} begins as {init!r}: {error.message}") from None


def _signature(
    function: Callable[..., Any], rule_name: str, ranges: Mapping[str, Mapping[str, Any]], wraps: str
) -> tuple[list[str], dict[str, Hyper]]:
    positional, hypers = [], {}
    for key, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY:
            hypers[key] = _hyper(rule_name, key, parameter, ranges.get(key))
        elif key in (*_ARGUMENTS, *FACTS, wraps) and parameter.kind is not parameter.VAR_KEYWORD:
            positional.append(key)
        else:
            known = ", ".join(_ARGUMENTS)
            raise RuleError(f"the function of {rule_name} has an argument {key!r}: positional arguments are {known}, "
                            f"and hyper-parameters come after *")  # fmt: skip
    if unknown := sorted(ranges.keys() - hypers.keys()):
        hint = did_you_mean(unknown[0], hypers)
        raise RuleError(f"{rule_name} has no hyper-parameter {unknown[0]!r} to give a range to{hint}")
    return positional, hypers


def _hyper(rule_name: str, key: str, parameter: inspect.Parameter, entry: Any) -> Hyper:
    if key in RESERVED:
        raise RuleError(f"{key!r} of {rule_name} is {RESERVED[key]}: it stands before *")
    if entry is not None and not isinstance(entry, Mapping):
        raise RuleError(f"the range of {key} of {rule_name} is a dict, not {entry!r}")
    flags = ("static", "whole")
    known = [*Limits.__annotations__, *flags]
    for option, value in (entry or {}).items():
        if option not in known:
            hint = did_you_mean(option, known) or f": it has {', '.join(known)}"
            raise RuleError(f"the range of {key} of {rule_name} has no {option!r}{hint}")
        if _number(value) is None and option not in flags:
            raise RuleError(f"{option} of {key} of {rule_name} is a number, not {value!r}")
    options = dict(entry or {})
    said = {flag: bool(options.pop(flag, False)) for flag in flags}
    limits = cast(Limits, {k: float(v) for k, v in options.items()}) or well_known_range(key)
    default = parameter.default
    if default is parameter.empty:
        return Hyper(None, **limits, static=said["static"], whole=said["whole"])
    number = _number(default)
    if number is None:
        raise RuleError(f"the default of {key} of {rule_name} is a number, not {default!r}")
    return Hyper(number, **limits, static=said["static"], whole=said["whole"])
