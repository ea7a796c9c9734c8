"""The values in a rule written in Python while it is traced: arithmetic on them makes nodes."""

from __future__ import annotations

import contextvars
import re
from collections.abc import Mapping
from numbers import Real
from types import CodeType, FrameType
from typing import Any, Protocol

import numpy as np

from rulec.language.expr.counts import Level
from rulec.language.expr.functions import FUNCTIONS, CallError, numbered, part
from rulec.language.expr.node import Node, Op, const, node
from rulec.language.expr.text import short_text
from rulec.language.tracing.author import author_error, running_frame

_LOGIC_HINT = (
    "write rulec.math.cond(condition, lambda: a, lambda: b) for if, where(condition, a, b) for a choice in each "
    "element, and logical_and, logical_or, logical_not for and, or, not"
)


class Running(Protocol):
    """The trace of a running function.

    `frame` is the frame of the function with this `code`, from the first traced value on: it keeps the function's
    locals. `draws` is the number of the next random draw.
    """

    rule_name: str
    code: CodeType | None
    frame: FrameType | None
    draws: int


#: The trace of the function that runs now; None outside of one.
current: contextvars.ContextVar[Running | None] = contextvars.ContextVar("rulec_trace", default=None)


class Value:
    """A value of a rule being traced: arithmetic on it makes nodes.

    `trace` is the run of the function it was made in; None for a value made outside of one, of constants alone. In
    another run its names would mean other values.
    """

    __slots__ = ("node", "trace")

    def __init__(self, node: Node) -> None:
        self.node = node
        self.trace = trace = current.get()
        if trace is not None and trace.frame is None:
            trace.frame = running_frame(trace.code)

    def _binary(self, op: Op, other: Any, swapped: bool = False) -> Value:
        ours, theirs = as_traced(self), as_traced(other)
        return Value(node(op, theirs, ours) if swapped else node(op, ours, theirs))

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

    def __getitem__(self, places: Any) -> Value:
        slices = places if isinstance(places, tuple) else (places,)
        if len(slices) > 2 or not all(isinstance(s, slice) and s.step is None for s in slices):
            raise author_error("a traced value has rows and columns from a bound up to another: x[a:b] or x[:, a:b]")
        value = as_traced(self)
        for axis, bounds in zip(("rows", "cols"), slices, strict=False):
            ends = [None if end is None else as_traced(end) for end in (bounds.start, bounds.stop)]
            try:
                value = value if ends == [None, None] else part(value, axis, *ends)
            except CallError as error:
                raise author_error(str(error)) from None
        return Value(value)

    __setitem__ = __len__ = __iter__ = __contains__ = _no_sequence

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
        return Value(node(Op.NEG, as_traced(self)))

    def __pos__(self) -> Value:
        return self

    def __abs__(self) -> Value:
        return Value(node(Op.ABS, as_traced(self)))

    def __invert__(self) -> Value:
        return Value(node(Op.NOT, as_traced(self)))


class DimensionCount(Value):
    """The number of a tensor's dimensions: a rule is written out for every one, so it is no end of a range."""

    __slots__ = ()

    def __index__(self) -> int:
        raise author_error(
            "ndim differs from tensor to tensor: write rulec.math.over_axes(ndim, body) for a loop over range(ndim)"
        )


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


def stray_problem(trace: Running | None) -> str:
    """Why a value of this trace has no meaning in the function that runs now, as a sentence; empty where it has."""
    running = current.get()
    if trace is None or trace is running:
        return ""
    if running is None:
        return f"a value of the function of {trace.rule_name} has no meaning outside of it: return it from there"
    if trace.rule_name == running.rule_name:
        return f"this value is left from an earlier run of the function of {trace.rule_name}: make it in every run"
    return (
        f"this value belongs to the function of {trace.rule_name}, and its names mean others in {running.rule_name}: "
        f"make it of the arguments of {running.rule_name}"
    )


def check_trace(trace: Running | None) -> None:
    """RuleError at the author's line where a value of this trace has no meaning in the function that runs now."""
    if problem := stray_problem(trace):
        raise author_error(problem)


def as_traced(value: Any) -> Node:
    """The node of a traced value or of a plain number; RuleError at the author's line for anything else."""
    if isinstance(value, Value):
        check_trace(value.trace)
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


def _setting(value: Any) -> Any:
    """A keyword of a call: a word, a list, or a traced value."""
    if isinstance(value, list | tuple):
        return [_setting(x) for x in value]
    if isinstance(value, Level):
        check_trace(value.trace)
        return value
    return value if value is None or isinstance(value, str) else as_traced(value)


def record(function: str, *args: Any, **keywords: Any) -> Value:
    """The traced call of a function of the language."""
    nodes = [[as_traced(x) for x in arg] if isinstance(arg, list) else as_traced(arg) for arg in args]
    named = {k: _setting(v) for k, v in keywords.items()}
    try:
        value = FUNCTIONS[function](*nodes, **named)
    except CallError as error:
        raise author_error(str(error)) from None
    if (trace := current.get()) is not None:
        value, trace.draws = numbered(value, trace.draws)
    return Value(value)
