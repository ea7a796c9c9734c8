"""Rules written as Python functions: traced once with values that record what is done to them.

The function's source is never read. Its local names are noticed while it runs, so that a traced rule's lines are
called what its author called them.
"""

from __future__ import annotations

import contextvars
import inspect
import linecache
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, overload

from rulec.errors import RuleError
from rulec.language import compose
from rulec.language.functions import FUNCTIONS, CallError
from rulec.language.node import FACTS, Kind, Node, Op, const, name, node, rewrite, walk
from rulec.language.rule import (
    Assign,
    Hyper,
    Rule,
    State,
    Statement,
    check_direction_free_of_lr,
    check_rule,
    well_known_range,
)
from rulec.language.source import Source, Span, did_you_mean, rule_error

_ARGUMENTS = ("g", "grad", "p", "t", "s")


class Value:
    """A value of a rule being traced: arithmetic on it makes nodes."""

    __slots__ = ("node",)
    __array_ufunc__ = None  # NumPy must not take a traced value apart: its operators defer to ours

    def __init__(self, node: Node) -> None:
        self.node = node

    def _binary(self, op: Op, other: Any, swapped: bool = False) -> Value:
        theirs = _node(other)
        return Value(node(op, theirs, self.node) if swapped else node(op, self.node, theirs))

    def __bool__(self) -> bool:
        raise _error("a traced value is neither true nor false: write rulec.math.where(condition, a, b), "
                     "and logical_and, logical_or, logical_not for and, or, not")  # fmt: skip

    def __float__(self) -> float:
        raise _error("a traced value is not a number: use the functions of rulec.math, not those of math or numpy")

    __hash__ = None  # type: ignore[assignment]

    def __neg__(self) -> Value:
        return Value(node(Op.NEG, self.node))

    def __pos__(self) -> Value:
        return self

    def __abs__(self) -> Value:
        return Value(node(Op.ABS, self.node))

    def __invert__(self) -> Value:
        return Value(node(Op.NOT, self.node))


def _define_operators() -> None:
    """Gives Value every binary operator of the language, and its mirrored form."""
    plain = {
        "add": Op.ADD, "sub": Op.SUB, "mul": Op.MUL, "truediv": Op.DIV, "pow": Op.POW, "mod": Op.MOD,
        "floordiv": Op.FLOORDIV, "matmul": Op.MATMUL, "and": Op.AND, "or": Op.OR,
    }  # fmt: skip
    compare = {"lt": Op.LT, "le": Op.LE, "gt": Op.GT, "ge": Op.GE, "eq": Op.EQ, "ne": Op.NE}
    for word, op in {**plain, **compare}.items():
        setattr(Value, f"__{word}__", lambda self, other, op=op: self._binary(op, other))
    for word, op in plain.items():
        setattr(Value, f"__r{word}__", lambda self, other, op=op: self._binary(op, other, swapped=True))


_define_operators()


def _node(value: Any) -> Node:
    if isinstance(value, Value):
        return value.node
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _error(f"{value!r} cannot be part of a rule: use numbers and the function's own arguments")
    return const(value)


def record(function: str, *args: Any, **keywords: Any) -> Value:
    """The traced call of a function of the language."""
    try:
        return Value(FUNCTIONS[function](*map(_node, args), **keywords))
    except CallError as error:
        raise _error(str(error)) from None


def _error(message: str) -> RuleError:
    """The error at the line of the author's function that is running."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and str(frame.f_globals.get("__name__", "")).startswith("rulec."):
        frame = frame.f_back
    if frame is None:
        return RuleError(message)
    file, line = frame.f_code.co_filename, frame.f_lineno
    text = linecache.getline(file, line).rstrip("\n")
    column = len(text) - len(text.lstrip()) + 1
    # Only the one line is kept: the source of a function may come from a notebook or a shell.
    return rule_error(message, Span(Source(file, "\n" * (line - 1) + text), line, column, max(1, len(text.strip()))))


class _Trace:
    """What one run of the function does: the lines so far, and how often each state was assigned."""

    def __init__(self, rule_name: str, state: Mapping[str, State], hyper: Mapping[str, Hyper]) -> None:
        self.rule_name = rule_name
        self.state = dict(state)
        self.hyper = dict(hyper)
        self.lines: list[tuple[str, Node]] = []
        self.version: dict[str, int] = dict.fromkeys(state, 0)
        self.locals: dict[Node, str] = {}

    def read(self, state: str) -> Value:
        return Value(name(f"{state}#{self.version[state]}"))

    def assign(self, state: str, value: Any) -> None:
        self.lines.append((f"{state}#{self.version[state] + 1}", _node(value)))
        self.version[state] += 1

    def call(self, rule: Rule, value: Any) -> Value:
        prefix, count = rule.key, 2
        while f"{prefix}.direction" in dict(self.lines):
            prefix, count = f"{rule.key}{count}", count + 1
        self.hyper = compose.unify_hyper([(self.rule_name, self.hyper), (rule.name, rule.hyper)])
        inner = compose.called_states(rule, prefix)
        self.state.update(inner)
        self.version.update(dict.fromkeys(inner, 0))
        for line in compose.inline(rule, prefix, _node(value)):
            self._inlined(line)
        return Value(name(f"{prefix}.direction"))

    def _inlined(self, line: Statement) -> None:
        if not isinstance(line, Assign):
            raise _error("a rule that branches on shape facts cannot be called from Python: write this rule in YAML")
        versioned = {key: name(f"{key}#{v}") for key, v in self.version.items()}
        value = compose.replace_names(line.value, versioned)
        if line.target in self.version:
            self.assign(line.target, Value(value))
        else:
            self.lines.append((line.target, value))


_current: contextvars.ContextVar[_Trace | None] = contextvars.ContextVar("rulec_trace", default=None)


class _States:
    """The `s` of a traced rule: attributes are its states."""

    __slots__ = ("_trace",)

    def __init__(self, trace: _Trace) -> None:
        object.__setattr__(self, "_trace", trace)

    def __getattr__(self, state: str) -> Value:
        return _checked(self, state).read(state)

    def __setattr__(self, state: str, value: Any) -> None:
        _checked(self, state).assign(state, value)


def _checked(states: _States, state: str) -> _Trace:
    """The trace behind `s`, where it has a state of this name."""
    trace: _Trace = object.__getattribute__(states, "_trace")
    if state not in trace.version:
        raise _error(f"{trace.rule_name} has no state {state!r}{did_you_mean(state, trace.version)}: "
                     f"declare it as state=dict({state}=0)")  # fmt: skip
    return trace


def call_rule(rule: Rule, value: Any) -> Any:
    """The direction of `rule` for an input traced in another rule's function."""
    trace = _current.get()
    if trace is None:
        raise RuleError(
            f"{rule.name} can be called inside the function of another rule; to run it use "
            f"rulec.array.Optimizer or rulec.torch.optimizer"
        )
    return trace.call(rule, value)


@contextmanager
def _noticing_locals(function: Callable[..., Any], found: dict[Node, str]) -> Iterator[None]:
    """Collects the names that `function` gives to traced values, as it returns."""
    code, before = function.__code__, sys.getprofile()

    def notice(frame: FrameType, event: str, _: Any) -> None:
        if event == "return" and frame.f_code is code:
            for key, value in frame.f_locals.items():
                if isinstance(value, Value) and value.node.op.kind is not Kind.LEAF:
                    found.setdefault(value.node, key)

    sys.setprofile(notice)
    try:
        yield
    finally:
        sys.setprofile(before)


@overload
def rule(function: Callable[..., Any], /) -> Rule: ...
@overload
def rule(
    *, state: Mapping[str, Any] | None = None, hyper: Mapping[str, Mapping[str, Any]] | None = None,
    name: str | None = None, assigns: str = "direction", paper: Mapping[str, Any] | None = None,
) -> Callable[[Callable[..., Any]], Rule]: ...  # fmt: skip


def rule(function: Callable[..., Any] | None = None, /, **options: Any) -> Any:
    """The rule that a Python function describes.

    The function takes any of `g` (gradient), `grad`, `p` (parameter), `t` (step, from 1), `s` (states as
    attributes), and hyper-parameters with defaults as keyword-only arguments. It returns the direction, or the new
    parameter where `assigns="p"`. `state` gives each state's initial value (a number, or "p" for the parameter), or a
    dict with `init` and `per`. `hyper` gives ranges: `hyper=dict(clip=dict(above=0))`.

    The function itself stays at `.function` and runs on NumPy arrays. Raises RuleError at the line of a mistake.
    """
    if function is None:
        return lambda f: _trace_rule(f, **options)
    return _trace_rule(function, **options)


def _trace_rule(
    function: Callable[..., Any], *, state: Mapping[str, Any] | None = None,
    hyper: Mapping[str, Mapping[str, Any]] | None = None, name: str | None = None, assigns: str = "direction",
    paper: Mapping[str, Any] | None = None,
) -> Rule:  # fmt: skip
    rule_name = name or "".join(part[:1].upper() + part[1:] for part in function.__name__.split("_"))
    if assigns not in ("direction", "p"):
        raise RuleError(f"assigns is 'direction' or 'p', not {assigns!r}")
    states = {key: _state(rule_name, key, value) for key, value in (state or {}).items()}
    positional, hypers = _signature(function, rule_name, hyper or {})
    trace = _Trace(rule_name, states, hypers)
    result = _run(function, trace, positional, hypers)
    if result is None:
        raise RuleError(f"the function of {rule_name} returns nothing: return the {assigns}")
    trace.lines.append((assigns, _node(result)))
    made = Rule(
        rule_name,
        step=tuple(_Lines(trace).statements()),
        hyper=trace.hyper,
        state=trace.state,
        summary=(inspect.getdoc(function) or "").partition("\n")[0],
        paper=paper or {},
        path=Path(function.__code__.co_filename),
        function=function,
    )
    return check_direction_free_of_lr(check_rule(made))


def _run(function: Callable[..., Any], trace: _Trace, positional: list[str], hypers: Mapping[str, Hyper]) -> Any:
    values: dict[str, Any] = {key: Value(name(key)) for key in (*positional, *hypers)}
    if "s" in values:
        values["s"] = _States(trace)
    token = _current.set(trace)
    try:
        with _noticing_locals(function, trace.locals):
            return function(*(values[key] for key in positional), **{key: values[key] for key in hypers})
    finally:
        _current.reset(token)


def _state(rule_name: str, key: str, entry: Any) -> State:
    options = dict(entry) if isinstance(entry, Mapping) else {"init": entry}
    if unknown := options.keys() - {"init", "per"}:
        raise RuleError(f"state {key} of {rule_name} has no option {sorted(unknown)[0]!r}: it has init and per")
    init = options.get("init", 0)
    if isinstance(init, str):
        from rulec.language.expression import Text, parse_expression

        value = parse_expression(Text(init, Source(f"<init of {key}>", init)), compose._AnyName())
    else:
        value = const(init)
    return State(value, per=options.get("per", "element"))


def _signature(
    function: Callable[..., Any], rule_name: str, ranges: Mapping[str, Mapping[str, Any]]
) -> tuple[list[str], dict[str, Hyper]]:
    positional, hypers = [], {}
    for key, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY:
            default = None if parameter.default is parameter.empty else float(parameter.default)
            hypers[key] = Hyper(default, **(ranges.get(key) or well_known_range(key)))
        elif key in (*_ARGUMENTS, *FACTS):
            positional.append(key)
        else:
            known = ", ".join(_ARGUMENTS)
            raise RuleError(f"the function of {rule_name} has an argument {key!r}: positional arguments are {known}, "
                            f"and hyper-parameters come after *")  # fmt: skip
    if unknown := ranges.keys() - hypers.keys():
        raise RuleError(f"{rule_name} has no hyper-parameter {sorted(unknown)[0]!r} to give a range to")
    return positional, hypers


class _Lines:
    """Turns a trace into the lines of a step: named values get lines, old values of states are kept where needed."""

    def __init__(self, trace: _Trace) -> None:
        self.trace = trace
        taken = {*trace.state, *trace.hyper, *_ARGUMENTS, *FACTS, "direction"}
        self.local = {n: self._free(key, taken) for n, key in trace.locals.items()}
        self.done: dict[Node, str] = {}
        self.out: list[Statement] = []
        self.current = dict.fromkeys(trace.state, 0)

    @staticmethod
    def _free(key: str, taken: set[str]) -> str:
        while key in taken:
            key += "_"
        taken.add(key)
        return key

    def statements(self) -> list[Statement]:
        for target, value in self.trace.lines:
            self._name_locals(value)
            state, _, version = target.partition("#")
            if version:
                self._keep_old(state)
            self.out.append(Assign(state, self._named(value)))
            if version:
                self.current[state] = int(version)
                self.done.setdefault(value, state)
        return self.out

    def _name_locals(self, value: Node) -> None:
        for part in walk([value]):
            if part in self.local and part is not value and part not in self.done:
                self.out.append(Assign(self.local[part], self._named(part)))
                self.done[part] = self.local[part]

    def _named(self, value: Node) -> Node:
        """`value` over names as they stand now: locals by name, states by their current version."""

        def change(n: Node) -> Node:
            if n.op is not Op.NAME or "#" not in str(n.arg):
                return n
            state, _, version = str(n.arg).partition("#")
            return name(state if int(version) == self.current[state] else f"{state}_{version}")

        known = {part: name(text) for part, text in self.done.items() if part is not value}
        memo = {part: text for part, text in known.items() if self._still_current(str(text.arg), part)}
        return rewrite([value], change, memo)[0]

    def _still_current(self, text: str, value: Node) -> bool:
        """Whether `text` still names `value`: a state assigned again since does not."""
        if text not in self.trace.state:
            return True
        return self.current[text] > 0 and (f"{text}#{self.current[text]}", value) in self.trace.lines

    def _keep_old(self, state: str) -> None:
        """Saves the value of `state` under a local name where a later line still reads it."""
        old = name(f"{state}#{self.current[state]}")
        position = next(i for i, (t, _) in enumerate(self.trace.lines) if t == f"{state}#{self.current[state] + 1}")
        later = [v for _, v in self.trace.lines[position + 1 :]]
        if any(part is old for part in walk(later)):
            self.out.append(Assign(f"{state}_{self.current[state]}", name(state)))
