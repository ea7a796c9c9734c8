"""LLVM values with the operators of numbers, for the formulas of `cpu.math`.

A `Real`, `Whole` or `Truth` stands for the result of one scalar instruction inside a loop for LLVM's vectoriser. No
operation branches, so no formula does. No operation may reassociate or contract: a fused multiply-add happens exactly
where `fma` is written, and the vector body and the scalar tail of a loop give equal bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ..common.constants import Format


@functools.cache
def scales_in_one() -> bool:
    """Whether the processor multiplies a vector by powers of two in one instruction that LLVM (tried: 22) knows."""
    import llvmlite.binding as llvm

    return bool(llvm.llvm_version_info[0] >= 22 and llvm.get_host_cpu_features().get("avx512f"))


class Unit:
    """Emits instructions of one floating-point format into one LLVM function."""

    def __init__(self, builder: Any, form: Format) -> None:
        from llvmlite import ir

        self.builder = builder
        self.form = form
        self.real_type = ir.FloatType() if form.bits == 32 else ir.DoubleType()
        self.whole_type = ir.IntType(form.bits)
        self.constant = ir.Constant
        self.function_type = ir.FunctionType
        self.exponent_type = ir.IntType(32)
        self.function = ir.Function

    def real(self, value: Real | float) -> Real:
        """A number rounded to a value of this unit's format; a value unchanged."""
        return value if isinstance(value, Real) else Real(self, self.constant(self.real_type, float(value)))

    def whole(self, value: Whole | int) -> Whole:
        """An integer wrapped to a value of the format's width; a value unchanged."""
        if isinstance(value, Whole):
            return value
        return Whole(self, self.constant(self.whole_type, value % (1 << self.form.bits)))

    def intrinsic(self, name: str, *args: Real) -> Real:
        """A call of `llvm.<name>` on reals."""
        kind = self.function_type(self.real_type, [self.real_type] * len(args))
        function = self.builder.module.declare_intrinsic(f"llvm.{name}", [self.real_type], kind)
        return Real(self, self.builder.call(function, [a.value for a in args]))

    def scaled(self, x: Real, count: Whole) -> Real:
        """`x * 2**count` by one instruction; only where `scales_in_one`."""
        exponent = count.value if self.form.bits == 32 else self.builder.trunc(count.value, self.exponent_type)
        name = f"llvm.ldexp.f{self.form.bits}.i32"
        function = self.builder.module.globals.get(name)
        if function is None:
            kind = self.function_type(self.real_type, [self.real_type, self.exponent_type])
            function = self.function(self.builder.module, kind, name)
        return Real(self, self.builder.call(function, [x.value, exponent]))

    def remainder(self, a: Real, b: Real) -> Real:
        """`a - b*trunc(a/b)`, exact."""
        return Real(self, self.builder.frem(a.value, b.value))


def _real(instruction: str, swapped: bool = False) -> Callable[[Real, Real | float], Real]:
    """The operator of an IEEE operation, rounded once; `swapped` for a Python number on the left."""

    def operator(self: Real, other: Real | float) -> Real:
        a, b = self.value, self.unit.real(other).value
        return Real(self.unit, getattr(self.unit.builder, instruction)(*((b, a) if swapped else (a, b))))

    return operator


def _compared(operator: str) -> Callable[[Real, Real | float], Truth]:
    """A comparison. With a NaN only `!=` holds."""
    order = "fcmp_unordered" if operator == "!=" else "fcmp_ordered"

    def compared(self: Real, other: Real | float) -> Truth:
        return Truth(self.unit, getattr(self.unit.builder, order)(operator, self.value, self.unit.real(other).value))

    return compared


def _whole(instruction: str) -> Callable[[Whole, Whole | int], Whole]:
    """The operator of an instruction on integers."""
    return lambda self, other: self.instruction(instruction, other)


def _truth(instruction: str) -> Callable[[Truth, Truth], Truth]:
    """The operator of an instruction on truths."""
    return lambda self, other: Truth(self.unit, getattr(self.unit.builder, instruction)(self.value, other.value))


class Real:
    """A floating-point value. Operators are the IEEE operations, each rounded once."""

    def __init__(self, unit: Unit, value: Any) -> None:
        self.unit = unit
        self.value = value

    __add__, __radd__ = _real("fadd"), _real("fadd", swapped=True)
    __sub__, __rsub__ = _real("fsub"), _real("fsub", swapped=True)
    __mul__, __rmul__ = _real("fmul"), _real("fmul", swapped=True)
    __truediv__, __rtruediv__ = _real("fdiv"), _real("fdiv", swapped=True)
    __lt__, __le__, __gt__, __ge__ = map(_compared, ("<", "<=", ">", ">="))
    equals = _compared("==")

    def __neg__(self) -> Real:
        return Real(self.unit, self.unit.builder.fneg(self.value))

    def __abs__(self) -> Real:
        return self.unit.intrinsic("fabs", self)

    def is_nan(self) -> Truth:
        return _compared("!=")(self, self)

    def bits(self) -> Whole:
        """The same bits as an integer."""
        return Whole(self.unit, self.unit.builder.bitcast(self.value, self.unit.whole_type))


class Whole:
    """An integer as wide as the format, in two's complement. Arithmetic wraps, and shifts fill with zeros."""

    def __init__(self, unit: Unit, value: Any) -> None:
        self.unit = unit
        self.value = value

    def instruction(self, name: str, other: Whole | int) -> Whole:
        """An instruction on this and another."""
        return Whole(self.unit, getattr(self.unit.builder, name)(self.value, self.unit.whole(other).value))

    __add__, __sub__, __mul__ = _whole("add"), _whole("sub"), _whole("mul")
    __and__, __or__, __xor__ = _whole("and_"), _whole("or_"), _whole("xor")
    __lshift__, __rshift__ = _whole("shl"), _whole("lshr")

    def halved(self) -> Whole:
        """Half of it as a signed number, rounded down."""
        return self.instruction("ashr", 1)

    def as_real(self) -> Real:
        """The real with these bits."""
        return Real(self.unit, self.unit.builder.bitcast(self.value, self.unit.real_type))


class Truth:
    """True or false; `&`, `|`, `^`, `~` combine, `where` chooses."""

    def __init__(self, unit: Unit, value: Any) -> None:
        self.unit = unit
        self.value = value

    __and__, __or__, __xor__ = _truth("and_"), _truth("or_"), _truth("xor")

    def __invert__(self) -> Truth:
        return Truth(self.unit, self.unit.builder.not_(self.value))


def where(condition: Truth, a: Real | float, b: Real | float) -> Real:
    """`a` where the condition holds, else `b`; both are computed, neither traps."""
    unit = condition.unit
    return Real(unit, unit.builder.select(condition.value, unit.real(a).value, unit.real(b).value))


def fma(a: Real, b: Real | float, c: Real | float) -> Real:
    """`a*b + c`, rounded once."""
    return a.unit.intrinsic("fma", a, a.unit.real(b), a.unit.real(c))


def near_sum(a: Real, b: float, c: float) -> Real:
    """`a*b + c`, rounded once or twice, whichever is faster: for results that may be either."""
    return a.unit.intrinsic("fmuladd", a, a.unit.real(b), a.unit.real(c))


def rint(x: Real) -> Real:
    """The nearest integer, halves to even."""
    return x.unit.intrinsic("roundeven", x)


def floor(x: Real) -> Real:
    """The largest integer not above `x`."""
    return x.unit.intrinsic("floor", x)


def sqrt(x: Real) -> Real:
    """The square root, correctly rounded; NaN below zero."""
    return x.unit.intrinsic("sqrt", x)


def with_sign_of(magnitude: Real, sign: Real) -> Real:
    """`magnitude` with the sign bit of `sign`."""
    return magnitude.unit.intrinsic("copysign", magnitude, sign)


def polynomial(x: Real, coefficients: tuple[float, ...]) -> Real:
    """`c[0] + c[1]*x + c[2]*x**2 + ...`: Horner's scheme in x**2, on pairs of terms, with half the chain of fma."""
    square = x * x
    pairs = [
        fma(x, coefficients[i + 1], coefficients[i]) if i + 1 < len(coefficients) else x.unit.real(coefficients[i])
        for i in range(0, len(coefficients), 2)
    ]
    total = pairs[-1]
    for pair in reversed(pairs[:-1]):
        total = fma(total, square, pair)
    return total
