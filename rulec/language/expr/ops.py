"""The operations of the rule language, a closed set, and the record of each: all that is known of it but its spellings.

A new operation of elements is a member of `Op`, a record, and a line in the table of each printer. The other tables of
the project are made of the records: of the language, the analysis, the array libraries, the conformance suite.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from fractions import Fraction
from typing import Any

import numpy as np


class Kind(Enum):
    """The kind of an operation. Passes and tables of the backends distinguish operations by it."""

    LEAF = auto()
    ARITHMETIC = auto()
    COMPARE = auto()
    LOGIC = auto()
    FUNCTION = auto()
    REDUCE = auto()
    MATRIX = auto()
    RANDOM = auto()
    BITS = auto()
    SHAPE = auto()
    CALL = auto()


class Op(Enum):
    """One operation: its name as written in a rule, and its kind."""

    # An Enum's own hash is a function of Python's, and a step looks up hundreds of operations.
    __hash__ = object.__hash__

    CONST = ("const", Kind.LEAF)  # arg: the float
    NAME = ("name", Kind.LEAF)  # arg: an identifier of the rule's text; gone after lowering
    HYPER = ("hyper", Kind.LEAF)  # arg: the hyper-parameter's name
    MODEL_HYPER = ("model_hyper", Kind.LEAF)  # arg: a hyper-parameter that must be the same in every group
    STEP = ("t", Kind.LEAF)  # this tensor's own count of updates, from 1; arg: None, "group" or "model"
    FACT = ("fact", Kind.LEAF)  # arg: ndim | numel | rows | cols | machine_eps; of no rule: those of `WORDS` and `ROWS`
    LOAD = ("load", Kind.LEAF)  # arg: a buffer's name; its value before this step
    SCALAR = ("scalar", Kind.LEAF)  # arg: a column of the scalar program's table
    RESULT = ("result", Kind.LEAF)  # arg: the name of a finished reduction or matrix function

    ADD = ("+", Kind.ARITHMETIC)
    SUB = ("-", Kind.ARITHMETIC)
    MUL = ("*", Kind.ARITHMETIC)
    DIV = ("/", Kind.ARITHMETIC)
    POW = ("**", Kind.ARITHMETIC)
    MOD = ("%", Kind.ARITHMETIC)
    FLOORDIV = ("//", Kind.ARITHMETIC)
    NEG = ("neg", Kind.ARITHMETIC)

    LT = ("<", Kind.COMPARE)
    LE = ("<=", Kind.COMPARE)
    GT = (">", Kind.COMPARE)
    GE = (">=", Kind.COMPARE)
    EQ = ("==", Kind.COMPARE)
    NE = ("!=", Kind.COMPARE)

    AND = ("and", Kind.LOGIC)
    OR = ("or", Kind.LOGIC)
    NOT = ("not", Kind.LOGIC)

    WHERE = ("where", Kind.FUNCTION)
    SQRT = ("sqrt", Kind.FUNCTION)
    RSQRT = ("rsqrt", Kind.FUNCTION)
    CBRT = ("cbrt", Kind.FUNCTION)
    ABS = ("abs", Kind.FUNCTION)
    SIGN = ("sign", Kind.FUNCTION)
    EXP = ("exp", Kind.FUNCTION)
    LOG = ("log", Kind.FUNCTION)
    LOG1P = ("log1p", Kind.FUNCTION)
    EXPM1 = ("expm1", Kind.FUNCTION)
    TANH = ("tanh", Kind.FUNCTION)
    SIGMOID = ("sigmoid", Kind.FUNCTION)
    ERF = ("erf", Kind.FUNCTION)
    SIN = ("sin", Kind.FUNCTION)  # lowered to other operations but for values known before a step, as COS
    COS = ("cos", Kind.FUNCTION)
    ATAN2 = ("atan2", Kind.FUNCTION)  # args: y, x; lowered to other operations
    HYPOT = ("hypot", Kind.FUNCTION)
    FLOOR = ("floor", Kind.FUNCTION)
    ISFINITE = ("isfinite", Kind.FUNCTION)
    MINIMUM = ("minimum", Kind.FUNCTION)
    MAXIMUM = ("maximum", Kind.FUNCTION)

    # arg: the level that remains. In a rule's text, a level of `PLACED` has its number as a second operand.
    SUM = ("sum", Kind.REDUCE)
    MEAN = ("mean", Kind.REDUCE)
    NORM = ("norm", Kind.REDUCE)
    RMS = ("rms", Kind.REDUCE)
    MIN = ("min", Kind.REDUCE)
    MAX = ("max", Kind.REDUCE)
    COUNT_NONZERO = ("count_nonzero", Kind.REDUCE)

    MATMUL = ("@", Kind.MATRIX)
    # args: x, q, the dimension; lowered, args: x, q; arg: the extents of the dimension, before it and after it
    MODE_PRODUCT = ("matmul", Kind.MATRIX)
    GRAM = ("gram", Kind.MATRIX)  # args: x, the dimension; lowered, args: x; arg: as MODE_PRODUCT
    TRANSPOSE = ("transpose", Kind.MATRIX)
    EYE = ("eye", Kind.MATRIX)  # args: n; the constants of operations are in `rulec.language.expr.static`
    # In a rule's text, arg: None for a dimension, or for all without operands; "row" or "col" for a matrix of args: n.
    # Lowered, args: numbers; arg: a template and the extents of its letters, see `rulec.compiler.indices`.
    INDEX = ("index", Kind.MATRIX)
    DIAG = ("diag", Kind.MATRIX)  # the diagonal of a square matrix, per row; the diagonal matrix of a vector
    TRIU = ("triu", Kind.MATRIX)
    TRIL = ("tril", Kind.MATRIX)
    SLICE = ("slice", Kind.MATRIX)  # args: x, start, stop (infinity for the end); arg: "rows" or "cols"
    CONCAT = ("concat", Kind.MATRIX)  # args: a, b; arg: the axis, 0 or 1
    SOLVE = ("solve", Kind.MATRIX)  # args: a, b; arg: the kind of a
    CHOLESKY = ("cholesky", Kind.MATRIX)  # the lower factor
    # args: a vector of rows or columns, k; 1 where a value is one of the k largest, else 0
    TOPK = ("topk", Kind.MATRIX)
    QUANTILE = ("quantile", Kind.MATRIX)  # args: x, q; arg: the level that remains, the interpolation
    SORT = ("sort", Kind.MATRIX)  # args: x; arg: the level whose elements are ordered, as of ARGSORT
    ARGSORT = ("argsort", Kind.MATRIX)
    TAKE = ("take", Kind.MATRIX)  # args: x, places; arg: the level that places count in
    NEWTON_SCHULZ = ("newton_schulz", Kind.MATRIX)  # args: x, steps; arg: the dtype it is computed in, coefficients
    QR = ("qr", Kind.MATRIX)  # the orthogonal factor
    EIGH = ("eigh", Kind.MATRIX)  # the eigenvectors, by ascending eigenvalue
    SINGULAR_VECTORS = ("singular_vectors", Kind.MATRIX)  # args: x, rank; left ones, by descending singular value
    INVERSE_ROOT = ("inverse_root", Kind.MATRIX)  # args: x, order, and an optional addend of each eigenvalue
    # args: those of a function of `BLOCKWISE`, and the rows of a block; arg: the function's name and its constant
    IN_BLOCKS = ("in_blocks", Kind.MATRIX)

    # args: at, extents...; arg: the number of the draw in the rule. Lowered, args: at; arg: the number, extents...
    UNIFORM = ("uniform", Kind.RANDOM)
    NORMAL = ("normal", Kind.RANDOM)

    # Of float32 numbers, for values kept in fewer bits: no rule can write these. `count` is of ulps, away from zero.
    AWAY = ("away", Kind.BITS)  # args: x, count; x moved by so many ulps
    ULPS = ("ulps", Kind.BITS)  # args: x, y; the count from y to x, of one sign; 0 where x is NaN
    COARSE = ("coarse", Kind.BITS)  # args: x, count; x moved, and its lowest 16 bits cleared; x where it is not finite
    # args: a buffer, then words that are numbers: those of `WORDS`, the step, the number of the draw, and for a part of
    # a tensor those of `RANGE` or `ROWS`; a random whole number below 2**16 for each element, that depends on the first
    # five words and the element's place in the whole tensor alone
    CHANCE = ("chance", Kind.BITS)

    DIM = ("dim", Kind.SHAPE)  # args: a dimension, counted from the end where negative; gone after lowering
    SPREAD = ("spread", Kind.SHAPE)  # arg: an axis of the batch, see `PARTS`; of no rule: a value of it for the batch
    WIDEN = ("widen", Kind.SHAPE)  # arg: `Axes`; of no rule: a value of fewer axes, for each index of these

    CALL = ("call", Kind.CALL)  # args: input, t; arg: a wrapper's name for the inner rule; gone once there is one

    def __init__(self, symbol: str, kind: Kind) -> None:
        self.symbol = symbol
        self.kind = kind

    def __repr__(self) -> str:
        return f"Op.{self.name}"


#: Functions that kernels have of values known before a step alone: of hyper-parameters, `t` and shape facts.
WAVES = (Op.SIN, Op.COS)

#: The least and the greatest number.
Bound = tuple[float, float]

INFINITE = math.inf
ANY, POSITIVE, UNIT, SIGNS = (-INFINITE, INFINITE), (0.0, INFINITE), (0.0, 1.0), (-1.0, 1.0)

#: A function of an array library or of numbers with 50 digits.
Meaning = Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class OpSpec:
    """The record of an operation. An empty field says that the operation has nothing of the kind.

    - `arguments`: the names of its operands.
    - `array`: NumPy's name of its function, which other array libraries share. `numpy` is the function itself where
      NumPy has no function of this meaning.
    - `digits`: its meaning in 50 digits, a function of mpmath's context and the operands, or the name of a method of
      `rulec.language.expr.arithmetic.Digits`, or of mpmath's function.
    - `sympy`: the name of sympy's function, read both ways, or a function of the module sympy and the operands, for one
      way. An operation without it is an undefined function there.
    - `latex`: its name in papers, or a text around its operand. `word`: its name within names of values.
    - `error`: how far a machine's result may be from the exact one. It is "exact", "nearest" for the nearest number,
      or "function" for a few ulps, as `rulec.testing.Numerics` says.
    - `special`: rows of operands with their result, at zeros, infinities and NaN, by IEEE 754 and C99.
    - `grows`: finite operands may have a result beyond every float64.
    - `rises`: it never decreases; the number is the least of its domain.
    - `of_sizes`: the sizes of its operands alone decide, and it never decreases with them.
    - `is_flat`: a small change of an operand changes nothing.
    - `bounds`: the bound of its result from the bounds of its operands, for `rulec.analysis.bounds`.
    - `regions`: the regions of its result by its operand's region, for `rulec.analysis.regions`.
    - `degree`: the power of a positive factor of all operands in its result.
    """

    arguments: tuple[str, ...] = ("x",)
    array: str = ""
    numpy: Meaning | None = None
    digits: str | Meaning = ""
    sympy: str | Meaning = ""
    latex: str = ""
    word: str = ""
    error: str = ""
    special: tuple[tuple[float, ...], ...] = ()
    grows: bool = False
    rises: float | None = None
    of_sizes: bool = False
    is_flat: bool = False
    bounds: Callable[..., Bound] | None = None
    regions: Mapping[str, str] | None = None
    degree: Fraction | None = None

    @property
    def arity(self) -> int:
        """The number of operands."""
        return len(self.arguments)


# Meanings that NumPy lacks


def _erf(x: Any) -> Any:
    return np.vectorize(math.erf, otypes=[np.asarray(x).dtype])(x)


def _sigmoid(x: Any) -> Any:
    """The logistic function without overflow: exp sees only numbers up to 0."""
    small = np.exp(-np.abs(x))
    return np.where(np.signbit(x), small, 1.0) / (1.0 + small)


def _power(x: Any, y: Any) -> Any:
    """C99's pow. For one exponent of 0.5 NumPy takes the square root instead, which is -0 at -0 and NaN at -inf."""
    result = np.power(x, y)
    if np.size(y) == 1 and np.all(np.equal(y, 0.5)):
        return np.where(np.isneginf(x), -np.asarray(x), np.abs(result))
    return result


def _angle(y: Any, x: Any) -> Any:
    """The angle of the point (x, y), as though zeros had no sign: 0 + -0 is 0."""
    return np.arctan2(np.add(y, 0.0), np.add(x, 0.0))


def _bits(x: Any) -> Any:
    """The bits of numbers in float32."""
    return np.asarray(x, np.float32).view(np.int32)


def _away(x: Any, count: Any) -> Any:
    return (_bits(x) + np.asarray(count).astype(np.int32)).view(np.float32)


def _coarse(x: Any, count: Any) -> Any:
    cleared = _bits(_away(x, count)) & np.int32(-0x10000)
    return np.where(np.isfinite(x), cleared.view(np.float32), np.asarray(x, np.float32))


def _distance(mp: Any, a: Any, b: Any) -> Any:
    """The distance of a point from the origin: infinite beside an infinite coordinate, whatever the other one is."""
    return mp.inf if mp.isinf(a) or mp.isinf(b) else mp.nan if mp.isnan(a) or mp.isnan(b) else mp.hypot(a, b)


# Bounds of results


def negative(a: Bound) -> Bound:
    """The bound of `-a`."""
    return -a[1], -a[0]


def hull(a: Bound, b: Bound) -> Bound:
    """The bound of either."""
    return min(a[0], b[0]), max(a[1], b[1])


def size(a: Bound) -> Bound:
    """The bound of the absolute value."""
    inside = a[0] <= 0 <= a[1]
    return (0.0 if inside else min(map(abs, a)), max(map(abs, a)))


def _fixed(bound: Bound) -> Callable[..., Bound]:
    return lambda *_: bound


def _each_end(function: Callable[[float], float], first: float = -INFINITE) -> Callable[[Bound], Bound]:
    """The bound of a function that never decreases, from the least number of its domain on."""
    return lambda a: (function(max(a[0], first)), function(max(a[1], first)))


def _raised(a: Bound, b: Bound) -> Bound:
    if a[0] < 0:
        return ANY
    falls = (a[1] <= 1 and b[0] >= 0) or (a[0] >= 1 and b[1] <= 0)
    return UNIT if falls else (1.0, INFINITE) if a[0] >= 1 and b[0] >= 0 else POSITIVE


def _signed(a: Bound) -> Bound:
    return (0.0 if a[0] >= 0 else -1.0), (0.0 if a[1] <= 0 else 1.0)


def _exponential(a: Bound) -> Bound:
    return (1.0 if a[0] >= 0 else 0.0), (1.0 if a[1] <= 0 else INFINITE)


def _logarithm(a: Bound) -> Bound:
    return (0.0 if a[0] >= 1 else -INFINITE), (0.0 if a[1] <= 1 else INFINITE)


def _side_of(least: float) -> Callable[[Bound], Bound]:
    """The bound of a function with the sign of its operand, of which this is the least number."""
    return lambda a: (0.0 if a[0] >= 0 else least, 0.0 if a[1] <= 0 else INFINITE)


def _floor(x: float) -> float:
    return x if math.isinf(x) else float(math.floor(x))


_ONE, _NONE = Fraction(1), Fraction(0)
_INF, _NAN = math.inf, math.nan
#: Odd functions between -1 and 1.
_SIGMOIDAL = {"-": "-", "0": "0", "f": "f", "1": "f", "+": "f"}


def _infix(array: str, **fields: Any) -> OpSpec:
    """The record of an operator of two operands."""
    return OpSpec(arguments=("a", "b"), array=array, **fields)


def _compare(array: str, sympy: str, digits: Meaning) -> OpSpec:
    return _infix(array, sympy=sympy, digits=digits, bounds=_fixed(UNIT), degree=_NONE)


#: The record of each operation of elements, of truth values and of bits; functions in the order of the manual.
SPECS: Mapping[Op, OpSpec] = {
    Op.ADD: _infix(
        "add", digits=lambda mp, a, b: a + b, sympy=lambda sp, a, b: a + b, error="nearest", grows=True, degree=_ONE
    ),
    Op.SUB: _infix(
        "subtract", digits=lambda mp, a, b: a - b, sympy=lambda sp, a, b: a - b, error="nearest", grows=True,
        degree=_ONE,
    ),
    Op.MUL: _infix(
        "multiply", digits=lambda mp, a, b: a * b, sympy=lambda sp, a, b: a * b, error="nearest", grows=True
    ),
    Op.DIV: _infix("divide", digits="divide", sympy=lambda sp, a, b: a / b, error="nearest", grows=True),
    Op.POW: _infix("power", numpy=_power, digits="power", error="function", grows=True, bounds=_raised),
    Op.MOD: _infix(
        "remainder", digits="modulo", sympy="Mod", bounds=lambda _, b: POSITIVE if b[0] >= 0 else ANY, degree=_ONE
    ),
    Op.FLOORDIV: _infix(
        "", numpy=lambda a, b: np.floor(np.divide(a, b)), digits="floor_divide", sympy=lambda sp, a, b: sp.floor(a / b),
        bounds=lambda a, b: POSITIVE if a[0] >= 0 and b[0] >= 0 else ANY, degree=_NONE,
    ),
    Op.NEG: OpSpec(
        array="negative", digits=lambda mp, a: -a, sympy=lambda sp, a: -a, word="minus", error="exact",
        bounds=negative, regions={"-": "f1+", "0": "0", "f": "-", "1": "-", "+": "-"}, degree=_ONE,
    ),

    Op.LT: _compare("less", "Lt", lambda mp, a, b: a < b),
    Op.LE: _compare("less_equal", "Le", lambda mp, a, b: a <= b),
    Op.GT: _compare("greater", "Gt", lambda mp, a, b: a > b),
    Op.GE: _compare("greater_equal", "Ge", lambda mp, a, b: a >= b),
    Op.EQ: _compare("equal", "Eq", lambda mp, a, b: a == b),
    Op.NE: _compare("not_equal", "Ne", lambda mp, a, b: a != b),
    Op.AND: _compare("logical_and", "And", lambda mp, a, b: bool(a) and bool(b)),
    Op.OR: _compare("logical_or", "Or", lambda mp, a, b: bool(a) or bool(b)),
    Op.NOT: OpSpec(
        array="logical_not", digits=lambda mp, a: not a, sympy="Not", word="not", bounds=_fixed(UNIT), degree=_NONE
    ),

    Op.SQRT: OpSpec(
        array="sqrt", digits="square_root", sympy=lambda sp, x: sp.sqrt(x), latex=r"\sqrt{%s}", word="sqrt",
        error="nearest", special=((0.0, 0.0), (-0.0, -0.0), (_INF, _INF), (-1.0, _NAN), (_NAN, _NAN)), rises=0.0,
        bounds=_each_end(math.sqrt, 0.0), regions={"0": "0", "f": "f", "1": "1", "+": "+"}, degree=Fraction(1, 2),
    ),
    Op.RSQRT: OpSpec(
        numpy=lambda x: 1.0 / np.sqrt(x), digits="inverse_square_root", sympy=lambda sp, x: 1 / sp.sqrt(x),
        latex=r"\frac{1}{\sqrt{%s}}",
        special=((0.0, _INF), (-0.0, -_INF), (_INF, 0.0), (-1.0, _NAN), (_NAN, _NAN)), bounds=_fixed(POSITIVE),
        regions={"f": "+", "1": "1", "+": "f"}, degree=Fraction(-1, 2),
    ),
    Op.CBRT: OpSpec(
        array="cbrt", digits=lambda mp, x: x if mp.isnan(x) else mp.sign(x) * mp.cbrt(abs(x)), latex=r"\sqrt[3]{%s}",
        word="cbrt", error="function", rises=-_INF,
        special=((0.0, 0.0), (-0.0, -0.0), (_INF, _INF), (-_INF, -_INF), (_NAN, _NAN)),
        bounds=_each_end(math.cbrt), regions={"-": "-", "0": "0", "f": "f", "1": "1", "+": "+"}, degree=Fraction(1, 3),
    ),
    Op.ABS: OpSpec(
        array="abs", digits=lambda mp, x: abs(x), sympy="Abs", latex=r"\left|%s\right|", word="abs", error="exact",
        special=((-0.0, 0.0), (-_INF, _INF), (_NAN, _NAN)), of_sizes=True, bounds=size,
        regions={"-": "f1+", "0": "0", "f": "f", "1": "1", "+": "+"}, degree=_ONE,
    ),
    Op.SIGN: OpSpec(
        numpy=np.sign, digits=lambda mp, x: x if mp.isnan(x) else mp.sign(x), sympy="sign", word="sign", error="exact",
        special=((_INF, 1.0), (-_INF, -1.0), (_NAN, _NAN)), rises=-_INF, is_flat=True, bounds=_signed,
        regions={"-": "-", "0": "0", "f": "1", "1": "1", "+": "1"}, degree=_NONE,
    ),
    Op.EXP: OpSpec(
        array="exp", digits="exponential", sympy="exp", latex=r"\exp", word="exp", error="function", grows=True,
        special=((0.0, 1.0), (-0.0, 1.0), (_INF, _INF), (-_INF, 0.0), (_NAN, _NAN)), rises=-_INF, bounds=_exponential,
        regions={"-": "f", "0": "1", "f": "+", "1": "+", "+": "+"},
    ),
    Op.LOG: OpSpec(
        array="log", digits="logarithm", sympy="log", latex=r"\log", word="log", error="function", rises=0.0,
        special=((0.0, -_INF), (-0.0, -_INF), (1.0, 0.0), (_INF, _INF), (-1.0, _NAN), (_NAN, _NAN)),
        bounds=_logarithm, regions={"f": "-", "1": "0", "+": "f1+"},
    ),
    Op.LOG1P: OpSpec(
        array="log1p", digits=lambda mp, x: mp.log1p(x) if x > -1 else -mp.inf if x == -1 else mp.nan, sympy="log1p",
        word="log1p", error="function", rises=-1.0,
        special=((0.0, 0.0), (-0.0, -0.0), (-1.0, -_INF), (_INF, _INF), (-2.0, _NAN), (-_INF, _NAN), (_NAN, _NAN)),
        bounds=_side_of(-_INF), regions={"0": "0", "f": "f", "1": "f", "+": "f1+"},
    ),
    Op.EXPM1: OpSpec(
        array="expm1", digits=lambda mp, x: mp.inf if x > 1e9 else mp.mpf(-1) if x < -1e9 else mp.expm1(x),
        sympy="expm1", word="expm1", error="function", grows=True,
        special=((0.0, 0.0), (-0.0, -0.0), (_INF, _INF), (-_INF, -1.0), (_NAN, _NAN)), rises=-_INF,
        bounds=_side_of(-1.0), regions={"-": "-", "0": "0", "f": "f1+", "1": "+", "+": "+"},
    ),
    Op.TANH: OpSpec(
        array="tanh", digits="tanh", sympy="tanh", latex=r"\tanh", error="function", rises=-_INF, bounds=_signed,
        special=((0.0, 0.0), (-0.0, -0.0), (_INF, 1.0), (-_INF, -1.0), (_NAN, _NAN)), regions=_SIGMOIDAL,
    ),
    Op.SIGMOID: OpSpec(
        numpy=_sigmoid, digits="sigmoid", sympy=lambda sp, x: 1 / (1 + sp.exp(-x)), latex=r"\sigma", error="function",
        special=((0.0, 0.5), (_INF, 1.0), (-_INF, 0.0), (_NAN, _NAN)), rises=-_INF, bounds=_fixed(UNIT),
        regions=dict.fromkeys("-0f1+", "f"),
    ),
    Op.ERF: OpSpec(
        array="erf", numpy=_erf, digits="erf", sympy="erf", error="function", rises=-_INF, bounds=_signed,
        special=((0.0, 0.0), (-0.0, -0.0), (_INF, 1.0), (-_INF, -1.0), (_NAN, _NAN)), regions=_SIGMOIDAL,
    ),
    Op.FLOOR: OpSpec(
        array="floor", digits="floor", sympy="floor", latex=r"\left\lfloor %s\right\rfloor", word="floor",
        error="exact", special=((-0.0, -0.0), (_INF, _INF), (-_INF, -_INF), (_NAN, _NAN)), rises=-_INF, is_flat=True,
        bounds=_each_end(_floor), regions={"-": "-", "0": "0", "f": "0", "1": "1", "+": "1+"},
    ),
    Op.ISFINITE: OpSpec(
        array="isfinite", digits="isfinite", error="exact", special=((_INF, 0.0), (-_INF, 0.0), (_NAN, 0.0)),
        is_flat=True, bounds=_fixed(UNIT), degree=_NONE,
    ),
    # Lowered to other operations but for values known before a step; NaN far from 0.
    Op.SIN: OpSpec(
        array="sin", digits="sine", sympy="sin", latex=r"\sin", word="sin", error="function", bounds=_fixed(SIGNS),
        regions={"0": "0", "f": "f", "1": "f"},
    ),
    Op.COS: OpSpec(
        array="cos", digits="cosine", sympy="cos", latex=r"\cos", word="cos", error="function", bounds=_fixed(SIGNS),
        regions={"0": "1", "f": "f", "1": "f"},
    ),
    Op.MINIMUM: _infix(
        "minimum", digits=lambda mp, a, b: a + b if mp.isnan(a) or mp.isnan(b) else min(a, b), sympy="Min",
        latex=r"\min", word="min", error="exact", special=((_NAN, 1.0, _NAN), (1.0, _NAN, _NAN)),
        bounds=lambda a, b: (min(a[0], b[0]), min(a[1], b[1])), degree=_ONE,
    ),
    Op.MAXIMUM: _infix(
        "maximum", digits=lambda mp, a, b: a + b if mp.isnan(a) or mp.isnan(b) else max(a, b), sympy="Max",
        latex=r"\max", word="max", error="exact", special=((_NAN, 1.0, _NAN), (1.0, _NAN, _NAN)),
        bounds=lambda a, b: (max(a[0], b[0]), max(a[1], b[1])), degree=_ONE,
    ),
    Op.HYPOT: _infix(
        "hypot", digits=_distance, sympy="hypot", word="hypot", error="function", grows=True, of_sizes=True,
        special=(
            (0.0, -0.0, 0.0), (-0.0, -0.0, 0.0), (-3.0, 4.0, 5.0), (_INF, _NAN, _INF), (_NAN, -_INF, _INF),
            (-_INF, 1.0, _INF), (_NAN, 1.0, _NAN),
        ),
        bounds=lambda a, b: (max(size(a)[0], size(b)[0]), INFINITE), degree=_ONE,
    ),
    # Lowered to other operations.
    Op.ATAN2: OpSpec(
        arguments=("y", "x"), numpy=_angle, digits="angle", sympy="atan2", latex=r"\operatorname{atan2}",
        bounds=_fixed((-math.pi, math.pi)),
    ),
    Op.WHERE: OpSpec(
        arguments=("condition", "a", "b"), numpy=np.where, digits=lambda mp, condition, a, b: a if condition else b,
        error="exact", bounds=lambda _, a, b: hull(a, b),
    ),

    Op.AWAY: OpSpec(arguments=("x", "count"), numpy=_away),
    Op.COARSE: OpSpec(arguments=("x", "count"), numpy=_coarse),
    Op.ULPS: OpSpec(
        arguments=("x", "y"), numpy=lambda x, y: np.where(np.isnan(x), 0, _bits(x) - _bits(y)).astype(np.float32)
    ),
}  # fmt: skip

#: The operations of numbers and truth values that the language calls as functions.
FUNCTIONS = tuple(op for op in SPECS if op.kind is Kind.FUNCTION)


def having(field: str) -> dict[Op, Any]:
    """A field of the records by operation, without empty ones."""
    values = {op: getattr(spec, field) for op, spec in SPECS.items()}
    return {op: value for op, value in values.items() if value is not None and value is not False and value != ""}
