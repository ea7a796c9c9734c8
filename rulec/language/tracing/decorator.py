"""Rules written as Python functions: traced once, with values that record the operations on them.

The function's source is never read. Its local names are read while it runs, so the lines of a traced rule have the
author's names.
"""

from __future__ import annotations

import inspect
import linecache
import math
import re
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import replace
from numbers import Real
from pathlib import Path
from types import FunctionType
from typing import Any, cast, overload

from rulec.errors import RuleError
from rulec.language.check import (
    check_direction_free_of_lr,
    check_elementwise,
    check_names,
    check_rule,
    storage_problem,
    with_storage,
)
from rulec.language.compose.cases import check_routed_call, composed, with_rate_of_rest
from rulec.language.compose.combine import with_beginnings
from rulec.language.dimensions import Dimensions, axis_variable, both
from rulec.language.evaluations import check_point, gradient_of
from rulec.language.expr.counts import Level
from rulec.language.expr.names import RESERVED
from rulec.language.expr.node import FACTS, Node, Op, const, name
from rulec.language.hyper import Hyper, Limits, well_known_range
from rulec.language.parse.expression import length_of, parse_expression
from rulec.language.parse.located import Text
from rulec.language.rule import Rule
from rulec.language.rule_data import Pass, State
from rulec.language.sizes import MAX_LENGTH, entries
from rulec.language.source import Source, Span, did_you_mean, rule_error
from rulec.language.tracing.author import foreign_error
from rulec.language.tracing.lines import Lines
from rulec.language.tracing.options import (
    FACTS_OF_SHAPE,
    WHOLE,
    check_mappings,
    dimensions_of,
    expression_of,
    extents_of,
    input_kinds,
    varied,
    with_statistics,
    with_whole,
    wrapped_names,
)
from rulec.language.tracing.trace import At, CallsRouted, Counted, CountValue, Inner, States, Trace, call_rule
from rulec.language.tracing.value import DimensionCount, Value, as_traced, current, operation, record, stray_problem

__all__ = ["Value", "call_rule", "operation", "record", "rule"]

_ARGUMENTS = ("g", "grad", "p", "t", "s")
_OPTIONS = (
    "state", "storage", "hyper", "name", "assigns", "wraps", "passes", "paper", "inputs", "view", "interop",
    "statistics", "variants", *WHOLE,
)  # fmt: skip


@overload
def rule(function: Callable[..., Any], /) -> Rule: ...
@overload
def rule(
    *, state: Mapping[str, Any] | None = None, storage: Mapping[str, str] | None = None,
    hyper: Mapping[str, Mapping[str, Any]] | None = None, name: str | None = None, assigns: str = "direction",
    wraps: str | Sequence[str] | Mapping[str, Any] = (), passes: Mapping[str, Any] | None = None,
    paper: Mapping[str, Any] | None = None, inputs: Mapping[str, Any] | None = None,
    view: Mapping[str, str] | None = None, interop: Mapping[str, Any] | None = None,
    statistics: Mapping[str, str] | None = None, variants: Mapping[str, Sequence[Any]] | None = None,
    rate: str | float | None = None,
    evaluate: str | None = None, skip: str | None = None, applies_to: str | None = None,
    otherwise: Rule | str | None = None,
) -> Callable[[Callable[..., Any]], Rule]: ...  # fmt: skip


def rule(function: Callable[..., Any] | None = None, /, **options: Any) -> Any:
    """The rule of a Python function.

    The function takes any of `g` (gradient), `grad`, `p` (parameter), `t` (step, from 1), `s` (states as
    attributes), and hyper-parameters with defaults as keyword-only arguments. It returns the direction, or the new
    parameter where `assigns="p"`. `state` gives each state's initial value (a number, or an expression such as "p"),
    or a dict with `init`, `per`, `shape`, `if`, and `count`, `history` or `each`. `storage` names the states that
    stay float32: `storage=dict(x0="exact")`. `hyper` gives ranges, `hyper=dict(clip=dict(above=0))`, and defaults
    that follow others: `hyper=dict(beta3=dict(default="sqrt(beta2)"))`. `name` is the rule's name, by default the
    function's in camel case; `paper` has any of `title`, `authors`, `year` and `url`.

    `wraps` makes the rule a wrapper: it names the argument for the wrapped rule. In the function, `inner(g)`, or
    `inner(g, t=t, p=p)`, is the wrapped rule's direction, and `inner.p` afterwards its new parameter. Where the input
    of the call has another shape than the parameter: `wraps={"inner": {"shape": ["rank", "cols"]}}`.

    `passes` are points at which the model is evaluated again, by name: an expression such as "p + rho*g", or a dict
    with `point` and `when`. The function takes an argument of each name, here `climb`: `climb.g` is the gradient there.

    `inputs` has the kind of each input of a step: `dict(loss="scalar", h="like p", cov=dict(shape=["cols", "cols"]))`.
    The function takes an argument of each name.
    `view`, `rate`, `evaluate`, `skip`, `applies_to`, `otherwise`, `statistics` and `interop` are as in a rule file,
    with expressions in quotes; `otherwise` may be a Rule. `variants` are values to compare:
    `variants=dict(power=[0.5, 1])`.

    The function itself stays at `.function` and runs on NumPy arrays. Raises RuleError at the line of a mistake.
    """
    if unknown := sorted(options.keys() - set(_OPTIONS)):
        hint = did_you_mean(unknown[0], _OPTIONS) or f": it has {', '.join(_OPTIONS)}"
        raise RuleError(f"rulec.rule has no option {unknown[0]!r}{hint}")
    return (lambda f: _placed(f, options)) if function is None else _placed(function, options)


def _placed(function: Any, options: Mapping[str, Any], values: Mapping[str, Any] | None = None) -> Rule:
    """The rule of a function; an error without a place gets the function's first line.

    `values` has other lists and counts than the function's.
    """
    if not inspect.isfunction(function):
        raise RuleError(f"rulec.rule makes a rule of a function, not of {function!r}")
    try:
        traced = _traced(function, values or {}, {k: v for k, v in options.items() if k != "variants"})
        if values is None:
            traced = varied(traced, options.get("variants"))
        sizes = traced.sizes
        if sizes is None:
            return traced
        return replace(traced, sizes=replace(sizes, make=lambda values: _placed(function, options, values)))
    except RuleError as error:
        if error.place:
            raise
        raise rule_error(error.message, definition(function)) from None


def _traced(function: FunctionType, values: Mapping[str, Any], options: Mapping[str, Any]) -> Rule:
    """The rule of a function; where it calls rules that apply to some tensors only, of each choice of their cases."""
    called: list[Rule] = []

    def of_cases(cases: Sequence[Rule]) -> Rule:
        return with_rate_of_rest(_trace_rule(function, values, cases, **options), called, cases)

    while True:
        try:
            return composed(called, of_cases) if called else of_cases([])
        except CallsRouted as call:
            called.append(check_routed_call(function.__name__, cast(Rule, call.rule), options.get("applies_to")))


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
    function: FunctionType, others: Mapping[str, Any], cases: Sequence[Rule], *,
    state: Mapping[str, Any] | None = None, storage: Mapping[str, str] | None = None,
    hyper: Mapping[str, Mapping[str, Any]] | None = None,
    name: str | None = None, assigns: str = "direction", wraps: str | Sequence[str] | Mapping[str, Any] = (),
    passes: Mapping[str, Any] | None = None, paper: Mapping[str, Any] | None = None,
    inputs: Mapping[str, Any] | None = None, view: Mapping[str, str] | None = None,
    interop: Mapping[str, Any] | None = None, statistics: Mapping[str, str] | None = None, **whole: Any,
) -> Rule:  # fmt: skip
    rule_name = name or "".join(part[:1].upper() + part[1:] for part in function.__name__.split("_"))
    if assigns not in ("direction", "p"):
        raise RuleError(f"assigns is 'direction' or 'p', not {assigns!r}")
    check_mappings(rule_name, {"state": state, "storage": storage, "hyper": hyper, "passes": passes, "paper": paper,
                               "inputs": inputs, "view": view, "interop": interop,
                               "statistics": statistics})  # fmt: skip
    calls, shape = wrapped_names(rule_name, wraps)
    arguments = (*_ARGUMENTS, *FACTS, *calls, *(passes or {}), *(inputs or {}))
    positional, hypers, lists = _signature(function, rule_name, hyper or {}, arguments, others)
    for call in calls:
        if call not in positional:
            raise RuleError(f"{rule_name} wraps {call!r}, and its function has no such argument: add it before *")
    read = Counted(lists, {k: h.default for k, h in hypers.items() if h.static and isinstance(h.default, float)})
    kinds = input_kinds(rule_name, inputs or {}, [*hypers, *FACTS_OF_SHAPE])
    states: dict[str, State] = {}
    dimensions = dimensions_of(rule_name, whole.get("applies_to"))
    for key, entry in (state or {}).items():
        states |= _states(rule_name, key, entry, hypers, read, dimensions)
    points: dict[str, Pass] = {}
    for key, value in (passes or {}).items():
        points[key] = _pass(rule_name, key, value, [*hypers, *FACTS], [*states, *kinds, *map(gradient_of, points)])
    _check_arguments(rule_name, positional, points, kinds)
    check_names(Rule(rule_name, (), hypers, states, kinds, wraps=calls, passes=points))
    trace = Trace(rule_name, states, hypers, calls, function.__code__, read, points)
    trace.cases, trace.dimensions = cases, dimensions
    trace.inputs, trace.view, trace.shaped = kinds, dict(view or {}), shape is not None
    trace.lines.append((assigns, _run(function, trace, positional, hypers, assigns)))
    traced = Rule(
        rule_name,
        step=tuple(Lines(trace).statements()),
        hyper={key: replace(h, decides=h.decides or key in read.counts_read) for key, h in trace.hyper.items()},
        state=trace.state,
        inputs=trace.inputs,
        summary=(inspect.getdoc(function) or "").partition("\n")[0],
        paper=paper or {},
        view=trace.view,
        wraps=calls,
        wraps_shape=None
        if shape is None
        else extents_of(f"{calls[0]} of {rule_name}", shape, [*FACTS_OF_SHAPE, *hypers]),
        interop=dict(interop or {}),
        passes=points,
        path=Path(function.__code__.co_filename),
        function=function,
        sizes=read.sizes,
    )
    traced = with_whole(traced, {key: value for key, value in whole.items() if value is not None})
    traced = with_statistics(traced, trace.measured, statistics or {})
    return _stored(check_direction_free_of_lr(check_rule(with_beginnings(traced))), storage or {}, read.states)


def _check_arguments(
    rule: str, arguments: Container[str], passes: Iterable[str], inputs: Iterable[str]
) -> None:  # fmt: skip
    """RuleError where the function of a rule has no argument for one of its passes or inputs."""
    for word, key in [*(("a pass", key) for key in passes), *(("an input", key) for key in inputs)]:
        if key not in arguments:
            raise RuleError(f"{rule} has {word} {key!r}, and its function has no such argument: add it before *")


def _stored(rule: Rule, words: Mapping[str, str], lengths: Mapping[str, int]) -> Rule:
    """The rule with the states in `words` marked."""
    for key, word in words.items():
        for state in entries(key, lengths[key]) if key in lengths else [str(key)]:
            if problem := storage_problem(rule, state, word):
                raise RuleError(problem)
            rule = with_storage(rule, state, word)
    return rule


def _result(result: Any, rule_name: str, assigns: str) -> Node:
    if result is None:
        raise RuleError(f"the function of {rule_name} returns nothing: return the {assigns}")
    if not isinstance(result, Value | int | float) or isinstance(result, bool):
        kind = type(result).__name__
        raise RuleError(f"the function of {rule_name} returns a value of type {kind}: return one value, the {assigns}")
    if isinstance(result, Value) and (problem := stray_problem(result.trace)):
        raise RuleError(problem)
    return as_traced(result)


def _arguments(trace: Trace, positional: list[str], hypers: Mapping[str, Hyper]) -> dict[str, Any]:
    """The traced arguments of a rule's function, by name."""
    counted = trace.counted
    parts = {e for key, n in counted.lists.items() for e in entries(key, n)}
    values: dict[str, Any] = {key: Value(name(key)) for key in (*positional, *hypers) if key not in parts}
    values |= {key: CountValue(name(key), counted) for key in counted.counts}
    values |= {key: DimensionCount(name(key)) for key in ("ndim",) if key in positional}
    values |= {key: tuple(Value(name(e)) for e in entries(key, n)) for key, n in counted.lists.items()}
    if "s" in values:
        values["s"] = States(trace)
    return values | {call: Inner(trace, call) for call in trace.wraps} | {key: At(key) for key in trace.passes}


def _run(
    function: Callable[..., Any], trace: Trace, positional: list[str], hypers: Mapping[str, Hyper], assigns: str
) -> Node:  # fmt: skip
    """The traced value that a rule's function returns."""
    lists = trace.counted.lists
    parts = {e for key, n in lists.items() for e in entries(key, n)}
    token = current.set(trace)
    try:
        values = _arguments(trace, positional, hypers)
        keywords = [*(key for key in hypers if key not in parts), *lists]
        result = function(*(values[key] for key in positional), **{key: values[key] for key in keywords})
        trace.name_locals()
        for call in trace.wraps:
            if not values[call].called:
                raise RuleError(f"{call} is never called: write {call}(g) in the function of {trace.rule_name}")
        return _result(result, trace.rule_name, assigns)
    except (TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise foreign_error(error, function.__code__) or error from error
    finally:
        current.reset(token)


def _states(
    rule_name: str, key: str, entry: Any, hypers: Mapping[str, Hyper], counted: Counted, dimensions: Dimensions
) -> dict[str, State]:  # fmt: skip
    """A state, or the entries of a list or history, by name."""
    options = dict(entry) if isinstance(entry, Mapping) else {"init": entry}
    words = [word for word in ("count", "history", "each") if word in options]
    if len(words) > 1:
        raise RuleError(f"state {key} of {rule_name} has both {words[0]} and {words[1]}: keep one of them")
    if not words:
        return {key: _state(rule_name, key, options, hypers)}
    if words == ["each"]:
        variable, axes = axis_variable(options.pop("each"), f"state {key} of {rule_name}"), dimensions.axes
        counted.states[key] = len(axes)
        return {
            name: _state(rule_name, key, options, hypers, {variable: axis}, where)
            for name, (axis, where) in zip(entries(key, len(axes)), axes, strict=True)
        }
    (word,), length = words, options.pop(words[0])
    value = Text(length, Source("", length)) if isinstance(length, str) else length
    number, names = length_of(value, f"the {word} of {key} of {rule_name}", counted.lists, counted.counts)
    counted.counts_read.update(names)
    counted.states[key] = number
    if word == "history":
        counted.histories.add(key)
    return dict.fromkeys(entries(key, number), _state(rule_name, key, options, hypers))


def _state(
    rule_name: str, key: str, options: Mapping[str, Any], hypers: Mapping[str, Hyper],
    variables: Mapping[str, int] | None = None, where: Node | None = None,
) -> State:  # fmt: skip
    """A state, with values of variables in its expressions; tensors outside the condition `where` lack it."""
    if unknown := sorted(options.keys() - {"init", "per", "shape", "if"}):
        has = "init, per, shape, if, count, history and each"
        raise RuleError(f"state {key} of {rule_name} has no option {unknown[0]!r}: it has {has}")
    init, per = options.get("init", 0), options.get("per", "element")
    word, level = (per.word, per.number) if isinstance(per, Level) else (str(per), None)
    if isinstance(init, str):
        first = _initial(rule_name, key, init, [*hypers, "p", *FACTS], variables)
    elif (number := _number(init)) is not None:
        first = const(number)
    else:
        raise RuleError(f"state {key} of {rule_name} begins as a number or an expression in quotes, not as {init!r}")
    shape, owner = options.get("shape"), f"state {key} of {rule_name}"
    known = [*FACTS_OF_SHAPE, *hypers, "machine_eps"]
    extents = None if shape is None else extents_of(owner, shape, known, variables)
    condition = where
    if "if" in options:
        static = [name for name, hyper in hypers.items() if hyper.static]
        what, known = f"the condition of {owner}", [*FACTS_OF_SHAPE, *static]
        condition = both(where, expression_of(what, options["if"], known, variables=variables))
    return State(first, word, extents, condition, number=level)


def _pass(rule_name: str, key: str, entry: Any, numbers: list[str], others: list[str]) -> Pass:
    """The pass of an entry under `passes`; RuleError in one sentence."""
    options = dict(entry) if isinstance(entry, Mapping) else {"point": entry}
    if unknown := sorted(options.keys() - {"point", "when"}):
        raise RuleError(f"pass {key} of {rule_name} has no option {unknown[0]!r}: it has point and when")
    point, when = options.get("point"), options.get("when")
    if not isinstance(point, str) or not isinstance(when, str | None):
        raise RuleError(f"pass {key} of {rule_name} has a point and a condition in quotes, not {entry!r}")
    known = ["g", "grad", "p", "t", *numbers]
    try:
        return Pass(
            check_point(parse_expression(Text(point, Source("", point)), [*known, *others]), None),
            None if when is None else parse_expression(Text(when, Source("", when)), ["t", *numbers]),
        )
    except RuleError as error:
        raise RuleError(f"pass {key} of {rule_name} is {entry!r}: {error.message}") from None


def _number(value: Any) -> float | None:
    """A plain number of any kind as a float; None for NaN, for a number too large for float64, and for all else."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return None if math.isnan(number) else number


def _initial(
    rule_name: str, key: str, init: str, known: list[str], variables: Mapping[str, int] | None = None
) -> Node:  # fmt: skip
    try:
        return parse_expression(Text(init, Source("", init)), known, variables=variables)
    except RuleError as error:
        raise RuleError(f"state {key} of {rule_name} begins as {init!r}: {error.message}") from None


def _signature(
    function: Callable[..., Any], rule_name: str, ranges: Mapping[str, Mapping[str, Any]], arguments: Collection[str],
    others: Mapping[str, Any],
) -> tuple[list[str], dict[str, Hyper], dict[str, int]]:  # fmt: skip
    """The positional arguments, the hyper-parameters with the entries of lists, and the lengths of lists."""
    positional, hypers, lists, declared = list[str](), dict[str, Hyper](), dict[str, int](), set[str]()
    parameters = inspect.signature(function).parameters
    names = [key for key, parameter in parameters.items() if parameter.kind is parameter.KEYWORD_ONLY]
    for key, parameter in parameters.items():
        default = others.get(key, parameter.default)
        if parameter.kind is parameter.KEYWORD_ONLY:
            declared.add(key)
            listed = isinstance(default, list | tuple)
            if listed and not 1 <= len(default) <= MAX_LENGTH:
                raise RuleError(f"the list {key} of {rule_name} has 1 to {MAX_LENGTH} values, not {len(default)}")
            for entry, value in zip(entries(key, len(default)), default, strict=True) if listed else [(key, default)]:
                hypers[entry] = _hyper(rule_name, key, value, ranges.get(key), names)
            if listed:
                lists[key] = len(default)
        elif key in arguments and parameter.kind is not parameter.VAR_KEYWORD:
            positional.append(key)
        else:
            known = ", ".join(_ARGUMENTS)
            raise RuleError(f"the function of {rule_name} has an argument {key!r}: positional arguments are {known}, "
                            f"and hyper-parameters come after *")  # fmt: skip
    if unknown := sorted(ranges.keys() - declared):
        hint = did_you_mean(unknown[0], declared)
        raise RuleError(f"{rule_name} has no hyper-parameter {unknown[0]!r} to give a range to{hint}")
    return positional, hypers, lists


def _hyper(rule_name: str, key: str, default: Any, entry: Any, names: list[str]) -> Hyper:
    if key in RESERVED:
        raise RuleError(f"{key!r} of {rule_name} is {RESERVED[key]}: it stands before *")
    if entry is not None and not isinstance(entry, Mapping):
        raise RuleError(f"the range of {key} of {rule_name} is a dict, not {entry!r}")
    flags = ("static", "whole", "follows")
    known = [*Limits.__annotations__, *flags, "default"]
    for option, value in (entry or {}).items():
        if option not in known:
            hint = did_you_mean(option, known) or f": it has {', '.join(known)}"
            raise RuleError(f"the range of {key} of {rule_name} has no {option!r}{hint}")
        if _number(value) is None and option not in (*flags, "default"):
            raise RuleError(f"{option} of {key} of {rule_name} is a number, not {value!r}")
    options = dict(entry or {})
    said = {flag: bool(options.pop(flag, False)) for flag in flags}
    followed = options.pop("default", None)
    limits = cast(Limits, {k: float(v) for k, v in options.items()}) or well_known_range(key)
    bare = Hyper(None, **limits, static=said["static"], whole=said["whole"], follows=said["follows"])
    if followed is not None and default is not inspect.Parameter.empty:
        raise RuleError(f"{key} of {rule_name} has two defaults, {default!r} and {followed!r}: keep one of them")
    if followed is not None:
        what = f"the default of {key} of {rule_name}"
        value = check_elementwise(expression_of(what, followed, [*names, "machine_eps"]), what, None)
        start = float(value.arg) if value.op is Op.CONST else value  # type: ignore[arg-type]
        return replace(bare, default=start)
    if default is inspect.Parameter.empty:
        return bare
    number = _number(default)
    if number is None:
        raise RuleError(f"the default of {key} of {rule_name} is a number, not {default!r}")
    return replace(bare, default=number)
