"""The arguments of a rule written in Python while it is traced: arithmetic on them makes nodes."""

from __future__ import annotations

import contextvars
import linecache
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from numbers import Real
from types import CodeType, FrameType, TracebackType
from typing import Any

import numpy as np

from rulec.errors import RuleError
from rulec.language import compose
from rulec.language.functions import FUNCTIONS, CallError, numbered
from rulec.language.node import Kind, Node, Op, const, name, node
from rulec.language.rule import Assign, Hyper, Rule, State, Statement, assignments
from rulec.language.source import Source, Span, did_you_mean, rule_error
from rulec.language.text import short_text

_LOGIC_HINT = "write rulec.math.where(condition, a, b), and logical_and, logical_or, logical_not for and, or, not"


class Value:
    """A value of a rule being traced: arithmetic on it makes nodes."""

    __slots__ = ("node",)

    def __init__(self, node: Node) -> None:
        self.node = node
        if (trace := _current.get()) is not None and trace.frame is None:
            trace.frame = _frame_of(trace.code)

    def _binary(self, op: Op, other: Any, swapped: bool = False) -> Value:
        theirs = as_traced(other)
        return Value(node(op, theirs, self.node) if swapped else node(op, self.node, theirs))

    def __bool__(self) -> bool:
        raise author_error(f"a traced value is neither true nor false: {_LOGIC_HINT}")

    def _no_number(self, *_: Any) -> Any:
        raise author_error(
            "a traced value is not a number: use the functions of rulec.math, not those of math or numpy"
        )

    __float__ = __int__ = __index__ = __complex__ = __round__ = __trunc__ = __floor__ = __ceil__ = _no_number

    def _no_sequence(self, *_: Any) -> Any:
        raise author_error("a traced value has no parts: a rule works on all elements at once")

    def _no_operator(self, *_: Any) -> Any:
        raise author_error("this operator is not part of the rule language: a power is written **")

    __divmod__ = __rdivmod__ = __lshift__ = __rlshift__ = __rshift__ = __rrshift__ = _no_operator
    __xor__ = __rxor__ = _no_operator

    def __repr__(self) -> str:
        return f"<traced {re.sub('#[0-9]+', '', short_text(self.node))}>"

    __getitem__ = __setitem__ = __len__ = __iter__ = __contains__ = _no_sequence

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):  # Python and NumPy ask for these, and take no for an answer
            raise AttributeError(attribute)
        raise author_error(
            f"a traced value has no attribute {attribute!r}: use arithmetic and the functions of rulec.math"
        )

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **keywords: Any) -> Value:
        op = _UFUNCS.get(ufunc)
        if op is None or method != "__call__" or keywords:
            ours = ufunc.__name__ if ufunc.__name__ in FUNCTIONS else None
            hint = f"rulec.math.{ours}" if ours else "the functions of rulec.math"
            raise author_error(f"numpy.{ufunc.__name__} cannot be traced: use {hint}")
        return Value(node(op, *map(as_traced, inputs)))

    def __array_function__(self, function: Any, types: Any, args: Any, keywords: Any) -> Any:
        hint = f"rulec.math.{function.__name__}" if function.__name__ in FUNCTIONS else "the functions of rulec.math"
        raise author_error(f"numpy.{function.__name__} cannot be traced: use {hint}")

    __hash__ = None  # type: ignore[assignment]

    def __neg__(self) -> Value:
        return Value(node(Op.NEG, self.node))

    def __pos__(self) -> Value:
        return self

    def __abs__(self) -> Value:
        return Value(node(Op.ABS, self.node))

    def __invert__(self) -> Value:
        return Value(node(Op.NOT, self.node))


#: NumPy's functions for operators with a NumPy number on the left.
_UFUNCS: Mapping[Any, Op] = {
    np.add: Op.ADD, np.subtract: Op.SUB, np.multiply: Op.MUL, np.divide: Op.DIV, np.power: Op.POW,
    np.remainder: Op.MOD, np.floor_divide: Op.FLOORDIV, np.less: Op.LT, np.less_equal: Op.LE, np.greater: Op.GT,
    np.greater_equal: Op.GE, np.equal: Op.EQ, np.not_equal: Op.NE,
}  # fmt: skip


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


def as_traced(value: Any) -> Node:
    """The node of a traced value or of a plain number; RuleError at the author's line for anything else."""
    if isinstance(value, Value):
        return value.node
    if isinstance(value, bool | np.bool_) or not isinstance(value, Real):
        kind = type(value).__name__
        message = f"a value of type {kind} cannot be part of a rule: use numbers and the function's own arguments"
        raise author_error(message)
    try:
        number = float(value)
    except OverflowError:
        raise author_error("a number of a rule must fit into float64, and this one is too large") from None
    if number != number:
        raise author_error("NaN cannot be part of a rule: use numbers and the function's own arguments")
    return const(number)


def operation(op: Op, *args: Any) -> Value:
    """The traced operation on traced values and plain numbers."""
    return Value(node(op, *map(as_traced, args)))


def record(function: str, *args: Any, **keywords: Any) -> Value:
    """The traced call of a function of the language."""
    nodes = [[as_traced(x) for x in arg] if isinstance(arg, list) else as_traced(arg) for arg in args]
    named = {k: v if v is None or isinstance(v, str) else as_traced(v) for k, v in keywords.items()}
    try:
        value = FUNCTIONS[function](*nodes, **named)
    except CallError as error:
        raise author_error(str(error)) from None
    if (trace := _current.get()) is not None:
        value, trace.draws = numbered(value, trace.draws)
    return Value(value)


def author_error(message: str) -> RuleError:
    """The RuleError at the running line of the author's function."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and str(frame.f_globals.get("__name__", "")).partition(".")[0] in ("rulec", "numpy"):
        frame = frame.f_back
    return (
        RuleError(message)
        if frame is None
        else rule_error(message, _place(frame.f_code, frame.f_lineno, frame.f_lasti))
    )


def foreign_error(error: Exception, function: CodeType) -> RuleError | None:
    """An error of Python or another library as a RuleError at the author's line.

    None where the error came through no line of the author's file.
    """
    places = [tb for tb in _tracebacks(error) if tb.tb_frame.f_code.co_filename == function.co_filename]
    if not places:
        return None
    last = places[-1]
    place = _place(last.tb_frame.f_code, last.tb_lineno, last.tb_lasti)
    if isinstance(error, ArithmeticError):
        return rule_error(f"Python cannot work out this number ({error}): numbers of a rule fit into float64", place)
    if isinstance(error, AttributeError) and getattr(error.obj, "__name__", "") == "rulec.math":
        hint = did_you_mean(str(error.name), FUNCTIONS) or f": it has {', '.join(sorted(FUNCTIONS))}"
        return rule_error(f"rulec.math has no function {error.name!r}{hint}", place)
    marked = place.source.line(place.line)[place.column - 1 :][: place.width]
    called = re.match(r"[\w.]*?(\w+)\(", marked)
    if called is None:
        return rule_error(f"this line cannot be traced ({error}): {_HINT}", place)
    ours = f"use rulec.math.{called[1]}" if called[1] in FUNCTIONS else _HINT
    return rule_error(f"{called[0][:-1]} cannot be traced: {ours}", place)


_HINT = "use arithmetic and the functions of rulec.math"


def _tracebacks(error: Exception) -> Iterator[TracebackType]:
    """The tracebacks of an error, the deepest last."""
    tb = error.__traceback__
    while tb is not None:
        yield tb
        tb = tb.tb_next


def _place(code: CodeType, line: int, instruction: int) -> Span:
    """The place of an instruction in the author's line, or the whole line where Python does not say."""
    text = linecache.getline(code.co_filename, line).rstrip("\n")
    positions = next(islice(code.co_positions(), instruction // 2, None), (None, None, None, None))
    begin, end = len(text) - len(text.lstrip()), len(text)
    if positions[0] == line and positions[2] is not None and text:
        begin = len(text.encode()[: positions[2]].decode(errors="replace"))
        if positions[1] == line and positions[3] is not None:
            end = len(text.encode()[: positions[3]].decode(errors="replace"))
    # Only the one line is kept: the source of a function may come from a notebook or a shell.
    source = Source(code.co_filename, "\n" * (line - 1) + text)
    return Span(source, line, begin + 1, max(1, end - begin))


def _frame_of(code: CodeType | None) -> FrameType | None:
    """The running frame of the function with this code; None where it is not running."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame


class Trace:
    """The record of one run of the function: its assignments of states so far, and the names of values.

    The state `m` is the name `m#0` until its first assignment, then `m#1`, and so on: an expression means the same
    at every place. `locals` has the names of values, from the author or from a called rule. `frame` is the frame of
    the function with this `code`, from the first traced value on: it keeps the function's locals.
    """

    def __init__(
        self, rule_name: str, state: Mapping[str, State], hyper: Mapping[str, Hyper], wraps: str = "",
        code: CodeType | None = None,
    ) -> None:  # fmt: skip
        self.rule_name = rule_name
        self.wraps = wraps
        self.state = dict(state)
        self.hyper = dict(hyper)
        self.inputs: dict[str, str] = {}
        self.view: dict[str, str] = {}
        self.lines: list[tuple[str, Node]] = []
        self.version: dict[str, int] = dict.fromkeys(state, 0)
        self.locals: dict[Node, str] = {}
        self.called: set[str] = set()
        self.draws = 0
        self.code = code
        self.frame: FrameType | None = None

    def name_locals(self) -> None:
        """Adds the function's local names for traced values, as they were when it returned."""
        for key, value in self.frame.f_locals.items() if self.frame is not None else ():
            if isinstance(value, Value) and value.node.op.kind is not Kind.LEAF:
                self.locals.setdefault(value.node, key)
        self.frame = None

    def read(self, state: str) -> Value:
        """The state's value now."""
        return Value(name(f"{state}#{self.version[state]}"))

    def assign(self, state: str, value: Node) -> None:
        """The state's new value."""
        self.version[state] += 1
        self.lines.append((f"{state}#{self.version[state]}", value))

    def call(self, rule: Rule, value: Any) -> Value:
        """The direction of `rule` for this input. Its states become states of this rule, prefixed by its key."""
        try:
            return self._call(rule, as_traced(value))
        except RuleError as error:
            if error.place:
                raise
            raise author_error(error.message) from None

    def _call(self, rule: Rule, value: Node) -> Value:
        prefix, count = rule.key, 2
        while prefix in self.called:
            prefix, count = f"{rule.key}{count}", count + 1
        self.called.add(prefix)
        if any(state.condition is not None for state in rule.state.values()):
            raise RuleError(f"{rule.name} keeps states for some shapes only: call it in a rule file, under uses")
        self.hyper = compose.unify_hyper([(self.rule_name, self.hyper), (rule.name, rule.hyper)])
        self.inputs = compose.unify_inputs([Rule(self.rule_name, (), inputs=self.inputs), rule])
        if rule.view and self.view not in ({}, rule.view):
            raise RuleError(
                f"{rule.name} sees tensors as other matrices than the rule called before it: their view differs"
            )
        self.view = dict(rule.view) or self.view
        inner = compose.called_states(rule, prefix)
        self.state.update(inner)
        self.version.update(dict.fromkeys(inner, 0))
        values: dict[str, Node] = {}
        self.draws, draws = self.draws + compose.count_draws(rule), self.draws
        for line in compose.inline(rule, prefix, value, draws):
            states = {key: name(f"{key}#{version}") for key, version in self.version.items()}
            known = {**states, **values}
            after = _after([line], known)
            for target in dict.fromkeys(a.target for a in assignments((line,))):
                if target in after and after[target] is not known.get(target):
                    self._inlined(target, after[target], values)
        return Value(values[f"{prefix}.direction"])

    def _inlined(self, target: str, value: Node, values: dict[str, Node]) -> None:
        """Records an assignment of a called rule: of a state, or of a local name."""
        if target in self.version:
            self.assign(target, value)
        else:
            values[target] = value
            if value.op.kind is not Kind.LEAF:
                self.locals.setdefault(value, target)


def _after(step: Sequence[Statement], known: Mapping[str, Node]) -> dict[str, Node]:
    """The value of every name after some lines, over the values `known` before them; branches become `where`."""
    values = dict(known)
    for line in step:
        if isinstance(line, Assign):
            values[line.target] = compose.replace_names(line.value, values)
            continue
        condition = compose.replace_names(line.condition, values)
        then, otherwise = _after(line.then, values), _after(line.otherwise, values)
        for key in then.keys() & otherwise.keys():
            same = then[key] is otherwise[key]
            values[key] = then[key] if same else node(Op.WHERE, condition, then[key], otherwise[key])
    return values


_current: contextvars.ContextVar[Trace | None] = contextvars.ContextVar("rulec_trace", default=None)
set_current, reset_current = _current.set, _current.reset


class States:
    """The `s` of a traced rule: attributes are its states."""

    __slots__ = ("_trace",)

    def __init__(self, trace: Trace) -> None:
        object.__setattr__(self, "_trace", trace)

    def __getattr__(self, state: str) -> Value:
        return _checked(self, state).read(state)

    def __setattr__(self, state: str, value: Any) -> None:
        _checked(self, state).assign(state, as_traced(value))


class Inner:
    """The wrapped rule in a traced wrapper. It is called once, and then has a parameter `p`."""

    __slots__ = ("_trace", "called")

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self.called = False

    def __call__(self, value: Any, t: Any = None) -> Value:
        """The rule's direction for this input, at its own count of updates `t`."""
        wraps = self._trace.wraps
        if self.called:
            raise author_error(f"{wraps} is called a second time, and both calls would share its states: call it once")
        self.called = True
        count = name("t") if t is None else as_traced(t)
        self._trace.lines.append((wraps, node(Op.CALL, as_traced(value), count, wraps)))
        return Value(name(f"{wraps}.direction"))

    @property
    def p(self) -> Value:
        """The new parameter by the wrapped rule alone."""
        if not self.called:
            wraps = self._trace.wraps
            raise author_error(f"{wraps}.p has no value here: write {wraps}(g) above this line")
        return Value(name(f"{self._trace.wraps}.p"))


def _checked(states: States, state: str) -> Trace:
    """The trace behind `s`; RuleError where it has no state of this name."""
    trace: Trace = object.__getattribute__(states, "_trace")
    if state not in trace.version:
        hint = did_you_mean(state, trace.version) or f": declare it as state=dict({state}=0)"
        raise author_error(f"{trace.rule_name} has no state {state!r}{hint}")
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
