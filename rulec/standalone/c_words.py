"""How arithmetic is spelt in C99: operators with no more parentheses than they need, math.h, and a few functions.

Everything is what IEEE arithmetic and C99's Annex F say, in double or in float: functions of floats end in `f`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping

import numpy as np

from rulec.backend.printer import OpTable
from rulec.language.node import Op

#: The C type of each storage dtype.
TYPES: Mapping[str, str] = {"float32": "float", "float64": "double"}

_WHERE, _OR, _AND, _EQUAL, _COMPARE, _SUM, _PRODUCT, _UNARY, _ATOM = range(1, 10)


class Piece(str):
    """An expression, and how tightly its outermost operator binds; other texts are names and calls."""

    level: int

    def __new__(cls, text: str, level: int) -> Piece:
        piece = super().__new__(cls, text)
        piece.level = level
        return piece


def _in(text: str, least: int) -> str:
    """The expression in parentheses where it binds less tightly than `least`."""
    return text if getattr(text, "level", _ATOM) >= least else f"({text})"


def _infix(symbol: str, level: int, left: int, right: int) -> Callable[..., str]:
    return lambda a, b: Piece(f"{_in(a, left)} {symbol} {_in(b, right)}", level)


def _sum(symbol: str) -> Callable[..., str]:
    return _infix(symbol, _SUM, _SUM, _PRODUCT)


def _product(symbol: str) -> Callable[..., str]:
    return _infix(symbol, _PRODUCT, _PRODUCT, _UNARY)


def _comparison(symbol: str, level: int) -> Callable[..., str]:
    # One comparison of another, and `&&` within `||`, are right without parentheses, and compilers warn of them.
    return _infix(symbol, level, _SUM, _SUM)


def _where(condition: str, a: str, b: str) -> str:
    return Piece(f"{_in(condition, _OR)} ? {_in(a, _OR)} : {_in(b, _WHERE)}", _WHERE)


_OPERATORS: OpTable = {
    Op.ADD: _sum("+"), Op.SUB: _sum("-"), Op.MUL: _product("*"), Op.DIV: _product("/"),
    Op.NEG: lambda a: Piece(f"-{_in(a, _ATOM)}", _UNARY), Op.NOT: lambda a: Piece(f"!{_in(a, _ATOM)}", _UNARY),
    Op.LT: _comparison("<", _COMPARE), Op.LE: _comparison("<=", _COMPARE), Op.GT: _comparison(">", _COMPARE),
    Op.GE: _comparison(">=", _COMPARE), Op.EQ: _comparison("==", _EQUAL), Op.NE: _comparison("!=", _EQUAL),
    Op.AND: _infix("&&", _AND, _AND, _EQUAL), Op.OR: _infix("||", _OR, _ATOM, _ATOM), Op.WHERE: _where,
    Op.ISFINITE: "isfinite({})",
}  # fmt: skip

_FUNCTIONS: Mapping[Op, str] = {
    Op.POW: "pow", Op.MOD: "floored_modulo", Op.SQRT: "sqrt", Op.CBRT: "cbrt", Op.ABS: "fabs", Op.SIGN: "sign_of",
    Op.EXP: "exp", Op.LOG: "log", Op.TANH: "tanh", Op.SIGMOID: "sigmoid", Op.ERF: "erf", Op.FLOOR: "floor",
    Op.MINIMUM: "minimum", Op.MAXIMUM: "maximum",
}  # fmt: skip


def operations(compute: str) -> OpTable:
    """The table for code computed in float32 or float64."""
    suffix = "f" if compute == "float32" else ""
    one = "1.0f" if suffix else "1.0"
    functions = {op: f"{name}{suffix}({{}}{', {}' * (_arity(op) - 1)})" for op, name in _FUNCTIONS.items()}
    return {
        **_OPERATORS,
        **functions,
        Op.FLOORDIV: lambda a, b: f"floor{suffix}({_product('/')(a, b)})",
        Op.RSQRT: lambda a: Piece(f"{one} / sqrt{suffix}({a})", _PRODUCT),
    }


def _arity(op: Op) -> int:
    return 2 if op in (Op.POW, Op.MOD, Op.MINIMUM, Op.MAXIMUM) else 1


def literal(value: float, compute: str) -> str:
    """A float64 constant as C has it, rounded once to the dtype it is computed with."""
    if math.isnan(value):
        return "NAN" if compute == "float32" else Piece("(double)NAN", _UNARY)
    if compute == "float32":
        with np.errstate(over="ignore"):
            single = np.float32(value)
        text = "INFINITY" if np.isinf(single) else f"{_point(str(abs(single)))}f"
    else:
        text = Piece("(double)INFINITY", _UNARY) if math.isinf(value) else _point(repr(abs(value)))
    negative = math.copysign(1.0, value) < 0
    return Piece(f"-{_in(text, _ATOM)}", _UNARY) if negative else text


def _point(digits: str) -> str:
    """Digits that C reads as a floating constant: `1` and `1e-08` as `1.0` and `1e-08`."""
    return digits if re.search(r"[.e]", digits) else f"{digits}.0"


def cast(text: str, compute: str) -> str:
    """A double expression as the dtype of arithmetic."""
    return Piece(f"(float){_in(text, _ATOM)}", _UNARY) if compute == "float32" else text


_WORDS: Mapping[str, str] = {
    "minimum": """\
/* The lesser of two; NaN where either is. */
static inline real minimumS(real a, real b)
{
    return a < b || a != a ? a : b;
}
""",
    "maximum": """\
/* The greater of two; NaN where either is. */
static inline real maximumS(real a, real b)
{
    return a > b || a != a ? a : b;
}
""",
    "sign_of": """\
/* 1, -1 or 0 by the sign of x; NaN of NaN. */
static inline real sign_ofS(real x)
{
    return x > 0 ? 1 : x < 0 ? -1 : x;
}
""",
    "sigmoid": """\
/* 1 / (1 + exp(-x)) without overflow: exp only sees what is not positive. */
static inline real sigmoidS(real x)
{
    const real small = expS(-fabsS(x));
    return (x < 0 ? small : 1) / (1 + small);
}
""",
    "floored_modulo": """\
/* What is left of a / b rounded down: it has the sign of b. */
static inline real floored_moduloS(real a, real b)
{
    const real rest = fmodS(a, b);
    return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
}
""",
    "fold_sum": """\
/* Adds up what blocks left, in their order: `parts` is blocks times count, and the sums replace its first block. */
static void fold_sum(double *parts, int64_t blocks, int64_t count)
{
    for (int64_t block = 1; block < blocks; block++) {
        for (int64_t i = 0; i < count; i++) {
            parts[i] += parts[block * count + i];
        }
    }
}
""",
    "fold_min": """\
/* The least of what blocks left: `parts` is blocks times count, and the result replaces its first block. */
static void fold_min(double *parts, int64_t blocks, int64_t count)
{
    for (int64_t block = 1; block < blocks; block++) {
        for (int64_t i = 0; i < count; i++) {
            parts[i] = minimum(parts[i], parts[block * count + i]);
        }
    }
}
""",
    "fold_max": """\
/* The greatest of what blocks left: `parts` is blocks times count, and the result replaces its first block. */
static void fold_max(double *parts, int64_t blocks, int64_t count)
{
    for (int64_t block = 1; block < blocks; block++) {
        for (int64_t i = 0; i < count; i++) {
            parts[i] = maximum(parts[i], parts[block * count + i]);
        }
    }
}
""",
}

#: What reducing nothing gives, as C.
NOTHING: Mapping[Op, str] = {Op.SUM: "0.0", Op.MIN: "(double)INFINITY", Op.MAX: "-(double)INFINITY"}

#: Names that a rule's values must not have in a printed file.
RESERVED = frozenset(
    (
        "auto break case char const continue default do double else enum extern float for goto if inline int long "
        "register restrict return short signed sizeof static struct switch typedef union unsigned void volatile while "
        "asm typeof bool true false NULL NAN INFINITY isfinite real malloc free size_t int64_t uint64_t errno linux "
        "unix fmod remainder "
        "i j k line column matrix chunk chunks tile tiles start stop top bottom left right height width batch rows "
        "cols count ndim shape param grad state head found view hyper work status bytes blocks parts at base end block"
    ).split()
) | {f"{word}{suffix}" for word in (*_FUNCTIONS.values(), *_WORDS, "fmod") for suffix in ("", "f")}


def words_used(text: str) -> list[str]:
    """The source of every function above that `text` calls, and that those call, each before its use."""
    found: list[str] = []
    for name, source in reversed(_WORDS.items()):
        for suffix, kind in (("f", "float"), ("", "double")):
            if any(re.search(rf"\b{name}{suffix}\(", used) for used in (text, *found)):
                printed = re.sub(r"\breal\b", kind, source)
                found.insert(0, re.sub(r"(?<=\w)S\(", f"{suffix}(", printed))
    return found
