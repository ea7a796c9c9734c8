"""LLVM values that read like numbers, so that the functions of `cpu_math` are written as formulas.

A `Real`, `Whole` or `Truth` stands for one scalar instruction's result inside a loop that LLVM will vectorise: none of
them branches, so neither does what is written with them. Nothing here is allowed to reassociate or contract: a fused
multiply-add happens exactly where `fma` is written, so the vector body and the scalar tail of a loop give equal bits.
"""

from __future__ import annotations

import functools
import struct
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Format:
    """A binary floating-point format: its width, and the bits of its fraction and exponent bias."""

    name: str
    bits: int
    fraction: int
    bias: int

    def pattern(self, value: float) -> int:
        """The bit pattern of `value` rounded to this format, as an unsigned integer."""
        code = "<f" if self.bits == 32 else "<d"
        return int.from_bytes(struct.pack(code, value), "little")

    @property
    def smallest_normal(self) -> float:
        return 2.0 ** (1 - self.bias)

    @property
    def largest(self) -> float:
        return (2.0 - 2.0**-self.fraction) * 2.0**self.bias

    @property
    def lift(self) -> int:
        """2**lift makes every subnormal number normal; a multiple of three, so that cube roots scale back exactly."""
        return 24 if self.bits == 32 else 54


SINGLE = Format("float32", 32, 23, 127)
DOUBLE = Format("float64", 64, 52, 1023)


@functools.cache
def scales_in_one() -> bool:
    """Whether one instruction multiplies a vector by powers of two here, and LLVM knows of it (tried with 22)."""
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
        """A number as a value of this unit's format, rounded to it; a value as it is."""
        return value if isinstance(value, Real) else Real(self, self.constant(self.real_type, float(value)))

    def whole(self, value: Whole | int) -> Whole:
        """An integer as a value of the format's width, wrapped to it; a value as it is."""
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


class Real:
    """A floating-point value. Operators are the IEEE operations, each rounded once."""

    def __init__(self, unit: Unit, value: Any) -> None:
        self.unit = unit
        self.value = value

    def _binary(self, instruction: str, left: Real | float, right: Real | float) -> Real:
        emit = getattr(self.unit.builder, instruction)
        return Real(self.unit, emit(self.unit.real(left).value, self.unit.real(right).value))

    def __add__(self, other: Real | float) -> Real:
        return self._binary("fadd", self, other)

    def __radd__(self, other: float) -> Real:
        return self._binary("fadd", other, self)

    def __sub__(self, other: Real | float) -> Real:
        return self._binary("fsub", self, other)

    def __rsub__(self, other: float) -> Real:
        return self._binary("fsub", other, self)

    def __mul__(self, other: Real | float) -> Real:
        return self._binary("fmul", self, other)

    def __rmul__(self, other: float) -> Real:
        return self._binary("fmul", other, self)

    def __truediv__(self, other: Real | float) -> Real:
        return self._binary("fdiv", self, other)

    def __rtruediv__(self, other: float) -> Real:
        return self._binary("fdiv", other, self)

    def __neg__(self) -> Real:
        return Real(self.unit, self.unit.builder.fneg(self.value))

    def __abs__(self) -> Real:
        return self.unit.intrinsic("fabs", self)

    def _compare(self, operator: str, other: Real | float) -> Truth:
        # Unordered for != alone: a NaN differs from everything, and no other comparison with it holds.
        emit = self.unit.builder.fcmp_unordered if operator == "!=" else self.unit.builder.fcmp_ordered
        return Truth(self.unit, emit(operator, self.value, self.unit.real(other).value))

    def __lt__(self, other: Real | float) -> Truth:
        return self._compare("<", other)

    def __le__(self, other: Real | float) -> Truth:
        return self._compare("<=", other)

    def __gt__(self, other: Real | float) -> Truth:
        return self._compare(">", other)

    def __ge__(self, other: Real | float) -> Truth:
        return self._compare(">=", other)

    def equals(self, other: Real | float) -> Truth:
        return self._compare("==", other)

    def is_nan(self) -> Truth:
        return self._compare("!=", self)

    def bits(self) -> Whole:
        """The same bits as an integer."""
        return Whole(self.unit, self.unit.builder.bitcast(self.value, self.unit.whole_type))


class Whole:
    """An integer as wide as the format, of two's complement; arithmetic wraps."""

    def __init__(self, unit: Unit, value: Any) -> None:
        self.unit = unit
        self.value = value

    def _binary(self, instruction: str, other: Whole | int) -> Whole:
        emit = getattr(self.unit.builder, instruction)
        return Whole(self.unit, emit(self.value, self.unit.whole(other).value))

    def __add__(self, other: Whole | int) -> Whole:
        return self._binary("add", other)

    def __sub__(self, other: Whole | int) -> Whole:
        return self._binary("sub", other)

    def __mul__(self, other: Whole | int) -> Whole:
        return self._binary("mul", other)

    def __and__(self, other: Whole | int) -> Whole:
        return self._binary("and_", other)

    def __or__(self, other: Whole | int) -> Whole:
        return self._binary("or_", other)

    def __xor__(self, other: Whole | int) -> Whole:
        return self._binary("xor", other)

    def __lshift__(self, count: int) -> Whole:
        return self._binary("shl", count)

    def __rshift__(self, count: int) -> Whole:
        return self._binary("lshr", count)

    def halved(self) -> Whole:
        """Half of it as a signed number, rounded down."""
        return self._binary("ashr", 1)

    def as_real(self) -> Real:
        """The real with these bits."""
        return Real(self.unit, self.unit.builder.bitcast(self.value, self.unit.real_type))


class Truth:
    """True or false; `&`, `|`, `^`, `~` combine, `where` chooses."""

    def __init__(self, unit: Unit, value: Any) -> None:
        self.unit = unit
        self.value = value

    def __and__(self, other: Truth) -> Truth:
        return Truth(self.unit, self.unit.builder.and_(self.value, other.value))

    def __or__(self, other: Truth) -> Truth:
        return Truth(self.unit, self.unit.builder.or_(self.value, other.value))

    def __xor__(self, other: Truth) -> Truth:
        return Truth(self.unit, self.unit.builder.xor(self.value, other.value))

    def __invert__(self) -> Truth:
        return Truth(self.unit, self.unit.builder.not_(self.value))


def where(condition: Truth, a: Real | float, b: Real | float) -> Real:
    """`a` where the condition holds, else `b`; both are computed, neither traps."""
    unit = condition.unit
    return Real(unit, unit.builder.select(condition.value, unit.real(a).value, unit.real(b).value))


def fma(a: Real, b: Real | float, c: Real | float) -> Real:
    """`a*b + c`, rounded once."""
    return a.unit.intrinsic("fma", a, a.unit.real(b), a.unit.real(c))


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
    """`c[0] + c[1]*x + c[2]*x**2 + ...`: Horner's scheme in x**2, on pairs of terms, so that half as many fma wait."""
    square = x * x
    pairs = [
        fma(x, coefficients[i + 1], coefficients[i]) if i + 1 < len(coefficients) else x.unit.real(coefficients[i])
        for i in range(0, len(coefficients), 2)
    ]
    total = pairs[-1]
    for pair in reversed(pairs[:-1]):
        total = fma(total, square, pair)
    return total
