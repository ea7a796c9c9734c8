"""The words of states in codes: elements to codes and back, and the scales of blocks, as `rulec.formats` defines them.

No word has a branch, so loops over a block can be vectors: the largest magnitude is taken over bits, as magnitudes of
floats grow with their bits, and whole numbers are rounded by a sum with 1.5*2**23. The functions below import llvmlite
and Numba. They run when a kernel is compiled, and never when one is printed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from rulec.formats import NAMES as FORMATS
from rulec.formats import Format, lines, reach, steps, table, zero
from rulec.formats.tables import FLOAT8

from ..common.constants import SINGLE
from .lanes import Real, Truth, Unit, Whole, near_sum, sqrt, where
from .words import alias_scopes, intrinsic_word, made_once, of_numba, pointer_of

#: The sets of memory that LLVM knows not to overlap, in a domain of their own.
_CODES, _SCALES, _VALUES, _TABLES = range(4)

#: float32 bits of infinity.
_INFINITE = 0x7F800000

#: The sum with it rounds to a whole number, in the low bits.
_ROUNDING = 12582912.0


def traits(form: Format) -> str:
    """The part of a word's name that is for a format, whatever its block: `int8_unsigned_floor`."""
    return f"{form.name}_{'signed' if form.signed else 'unsigned'}{'_floor' * form.floor}"


# Memory


def _access(builder: Any, kind: int, access: Any) -> Any:
    """Promises LLVM that codes, scales, values and tables do not overlap."""
    module = builder.module
    if not hasattr(module, "rulec_format_scopes"):
        module.rulec_format_scopes = alias_scopes(module, "rulec formats", _TABLES + 1)
    scope, others = module.rulec_format_scopes[kind]
    access.set_metadata("alias.scope", scope)
    access.set_metadata("noalias", others)
    return access


def _load(builder: Any, kind: int, at: Any, index: Any, element: Any) -> Any:
    return _access(builder, kind, builder.load(pointer_of(builder, at, index, element), align=1))


def _store(builder: Any, kind: int, at: Any, index: Any, value: Any) -> None:
    _access(builder, kind, builder.store(value, pointer_of(builder, at, index, value.type), align=1))


def _entry(unit: Unit, name: str, entries: Any, index: Any) -> Any:
    """An entry of a constant table of float32 or int32, at an index that is an LLVM value of 32 bits."""
    from llvmlite import ir

    module, kind = unit.builder.module, ir.FloatType() if entries.dtype == np.float32 else ir.IntType(32)
    held = module.globals.get(name)
    if held is None:
        numbers = ir.ArrayType(kind, entries.size)
        held = ir.GlobalVariable(module, numbers, name)
        held.linkage, held.global_constant = "internal", True
        held.initializer = numbers([kind(x.item()) for x in entries])
    index = unit.builder.zext(index, ir.IntType(64))
    pointer = unit.builder.gep(held, [ir.IntType(64)(0), index], inbounds=True)
    return _access(unit.builder, _TABLES, unit.builder.load(pointer))


# Values of codes


def _value(form: Format, unit: Unit, code: Any) -> Real:
    """The value of a code of 8 bits, or of 4 bits in 8, where the unit is 1."""
    builder = unit.builder
    if form.coding == "number":
        return Real(unit, builder.sitofp(code, unit.real_type))
    if form.coding == "root":
        root = Real(unit, builder.uitofp(code, unit.real_type)) * _inverse(255)
        return root * root
    if form.coding == "softsign":
        share = Real(unit, builder.sitofp(code, unit.real_type)) * _inverse(127)
        return share / (2.0 - abs(share))
    entry = _entry(unit, f"rulec_table_{traits(form)}", table(form), builder.zext(code, unit.whole_type))
    return Real(unit, entry)


def _inverse(number: float) -> float:
    """The float32 nearest to 1/number."""
    return float(np.float32(1) / np.float32(number))


def _unit_of(form: Format) -> Any:
    """`unit_<format>(scales, block)`: the factor of a block's values."""
    from numba import types

    def generate(builder: Any, _: Any, arguments: Any) -> Any:
        scales, block = arguments
        unit = Unit(builder, SINGLE)
        return (Real(unit, _load(builder, _SCALES, scales, block, unit.real_type)) * _inverse(form.largest)).value

    return intrinsic_word(2, lambda scales, block: types.float32, generate)


def _decode(form: Format, both: bool = True) -> Any:
    """`decode_<format>(values, i, codes, unit)`: writes the value of byte i of codes, or the two values.

    With `both` false, the byte has one of four bits, in its upper half.
    """
    from llvmlite import ir
    from numba import types

    def generate(builder: Any, _: Any, arguments: Any) -> None:
        values, index, codes, factor = arguments
        unit, byte, wide = Unit(builder, SINGLE), ir.IntType(8), ir.IntType(64)
        code = _load(builder, _CODES, codes, index, byte)

        def store(at: Any, code: Any) -> None:
            _store(builder, _VALUES, values, at, (_value(form, unit, code) * Real(unit, factor)).value)

        if form.bits == 8:
            store(index, code)
            return
        first = builder.shl(index, wide(1))
        store(first, builder.lshr(code, byte(4)))
        if both:
            store(builder.add(first, wide(1)), builder.and_(code, byte(15)))

    return intrinsic_word(4, lambda values, index, codes, unit: types.void, generate)


# Codes of values


def one_size(form: Format) -> bool:
    """Whether the scale of a block is its largest magnitude."""
    return form.signed and float(reach(form)) == 1


def _largest(side: str) -> Any:
    """The larger of `most` and of the bits of an element x, as int32, for the bits of the largest number of a block.

    `size(most, values, i)` is for the largest magnitude, and `above(most, values, i)` for the largest x above zero.
    `below(most, values, i)` is for the largest x below zero: the bits of negative numbers are the larger ones.
    """
    from numba import types

    def generate(builder: Any, _: Any, arguments: Any) -> Any:
        most, values, index = arguments
        unit = Unit(builder, SINGLE)
        bits = Real(unit, _load(builder, _VALUES, values, index, unit.real_type)).bits()
        each = (bits & 0x7FFFFFFF if side == "size" else bits).value
        compare = builder.icmp_unsigned if side == "below" else builder.icmp_signed
        return builder.select(compare(">", each, most), each, most)

    return intrinsic_word(3, lambda most, values, index: types.int32, generate)


def _scale(form: Format) -> Any:
    """`scale_<format>(scales, block, positive, negative)`: writes the scale of a block with these bits of `_largest`.

    It is NaN for a block with a value that is not finite.
    """
    from numba import types

    def generate(builder: Any, _: Any, arguments: Any) -> None:
        scales, block, positive, negative = arguments
        unit = Unit(builder, SINGLE)
        is_below = builder.icmp_signed("<", negative, unit.whole(0).value)
        negative = builder.select(is_below, (Whole(unit, negative) & 0x7FFFFFFF).value, unit.whole(0).value)
        scale = _most(form, Whole(unit, positive), Whole(unit, negative))
        scale = where(scale < form.smallest_scale, form.smallest_scale, scale)
        scale = where(scale > SINGLE.largest, SINGLE.largest, scale)
        infinite = unit.whole(_INFINITE).value
        finite = [Truth(unit, builder.icmp_signed("<", bits, infinite)) for bits in (positive, negative)]
        both = finite[0] & finite[1]
        _store(builder, _SCALES, scales, block, where(both, scale, math.nan).value)

    return intrinsic_word(4, lambda scales, block, positive, negative: types.void, generate)


def _factor(form: Format) -> Any:
    """`factor_<format>(scales, block)`: the factor from a block's values to numbers of codes."""
    from numba import types

    def generate(builder: Any, _: Any, arguments: Any) -> Any:
        scales, block = arguments
        unit = Unit(builder, SINGLE)
        scale = Real(unit, _load(builder, _SCALES, scales, block, unit.real_type))
        return (unit.real(form.largest) / scale).value

    return intrinsic_word(2, lambda scales, block: types.float32, generate)


def _most(form: Format, positive: Whole, negative: Whole) -> Real:
    """The scale of a block before its bounds."""
    if not form.signed or one_size(form):
        return positive.as_real()
    unit = positive.unit
    below = Truth(unit, unit.builder.icmp_signed(">=", negative.value, positive.value))
    return where(below, negative.as_real() / float(reach(form)), positive.as_real())


def _encode(form: Format, both: bool = True) -> Any:
    """`encode_<format>(codes, i, values, factor)`: writes byte i of codes, of one value or of two.

    With `both` false, the byte has the code of one value in its upper half.
    """
    from llvmlite import ir
    from numba import types

    def generate(builder: Any, _: Any, arguments: Any) -> None:
        codes, index, values, factor = arguments
        unit, wide = Unit(builder, SINGLE), ir.IntType(64)

        def code(at: Any) -> Whole:
            return _code(form, Real(unit, _load(builder, _VALUES, values, at, unit.real_type)), Real(unit, factor))

        if form.bits == 8:
            byte = code(index)
        else:
            first = builder.shl(index, wide(1))
            byte = code(first) << 4
            byte = byte | code(builder.add(first, wide(1))) if both else byte
        _store(builder, _CODES, codes, index, builder.trunc(byte.value, ir.IntType(8)))

    return intrinsic_word(4, lambda codes, index, values, factor: types.void, generate)


def _code(form: Format, x: Real, factor: Real) -> Whole:
    """The code of x in the lower bits, in a block of finite values."""
    unit = x.unit
    y = (x if form.signed else where(x > 0.0, x, 0.0)) * factor
    if form.name == "dynamic8" or (form.name == "dynamic4" and form.signed):
        return _by_cells(form, x, y)
    code = _nearest(form, y) & 0xFF
    none = zero(form)
    if form.floor and none is not None:
        is_none = Truth(unit, unit.builder.icmp_unsigned("==", code.value, unit.whole(none).value))
        code = _choice((x > 0.0) & is_none, unit.whole(none + 1), code)
    return code


def _choice(condition: Truth, a: Whole, b: Whole) -> Whole:
    return Whole(a.unit, a.unit.builder.select(condition.value, a.value, b.value))


def _less(a: Whole, b: int) -> Truth:
    return Truth(a.unit, a.unit.builder.icmp_unsigned("<", a.value, a.unit.whole(b).value))


def _nearest(form: Format, y: Real) -> Whole:
    """The code nearest to y, in the lower bits."""
    if form.name == "dynamic4":
        return _evenly(y)
    if form.coding == "float8":
        return _float8(form, y)
    if form.coding == "root":
        y = sqrt(y) * 255.0
    elif form.coding == "softsign":
        y = (y + y) / (1.0 + abs(y)) * 127.0
    return (y + _ROUNDING).bits()


def _by_cells(form: Format, x: Real, y: Real) -> Whole:
    """The code by `rulec.formats.Steps.entries`, of y = x times the factor."""
    unit, look, none = x.unit, steps(form), zero(form) if form.floor else None
    builder, bits, lowest = unit.builder, y.bits(), look.low << look.shift
    size = bits & 0x7FFFFFFF
    is_more = Truth(unit, builder.icmp_signed(">", size.value, unit.whole(lowest).value))
    start = _choice(is_more, size, unit.whole(lowest)) - lowest
    cell, low = start >> look.shift, start & ((1 << look.shift) - 1)
    if form.signed:
        is_below = x < 0.0 if form.floor else Truth(unit, builder.icmp_signed("<", bits.value, unit.whole(0).value))
        sign = Whole(unit, builder.sext(is_below.value, unit.whole_type))
        cell, low = cell + (sign & look.cells), (low ^ sign) - sign
    entries = look.entries(none).view(np.int32)
    code = (Whole(unit, _entry(unit, f"rulec_cells_{traits(form)}", entries, cell.value)) + low) >> look.shift
    if none is None:
        return code
    is_none = ~(x > 0.0) & ~(x < 0.0) if form.signed else ~(x > 0.0)
    return code - Whole(unit, builder.zext(is_none.value, unit.whole_type))


def _evenly(y: Real) -> Whole:
    """The code of unsigned dynamic4, by one line of `rulec.formats.lookup`: thresholds are evenly spaced."""
    ((slope, start),) = lines(Format("dynamic4", 128, signed=False)).lines
    place = near_sum(y, float(slope), float(start))
    step = (where(place > 0.0, place, 0.0) + _ROUNDING).bits() - 0x4B400000
    unit, index = y.unit, step + 1
    below = Real(unit, unit.builder.sitofp(index.value, unit.real_type)) * 0.0625 + 0.03125
    return index - Whole(unit, unit.builder.zext((~(y > below)).value, unit.whole_type))


def _float8(form: Format, y: Real) -> Whole:
    """The code of a number of eight bits: to nearest, ties to even."""
    unit, kind = y.unit, FLOAT8[form.name]
    drop, bits = 23 - kind.mantissa, y.bits()
    size = bits & 0x7FFFFFFF
    half, bias = (1 << (drop - 1)) - 1, (127 - kind.bias) << kind.mantissa
    normal = ((size + half + ((size >> drop) & 1)) >> drop) - bias
    power = unit.real(2.0 ** (24 - kind.bias - kind.mantissa))
    small = (size.as_real() + power).bits() - power.bits()
    least = int(np.float32(2.0 ** (1 - kind.bias)).view(np.uint32))
    return _choice(_less(size, least), small, normal) | ((bits >> 24) & 0x80)


def _clear() -> Any:
    """`clear(codes, i)`: writes zeros into byte i."""
    from llvmlite import ir
    from numba import types

    def generate(builder: Any, _: Any, arguments: Any) -> None:
        codes, index = arguments
        _store(builder, _CODES, codes, index, ir.IntType(8)(0))

    return intrinsic_word(2, lambda codes, index: types.void, generate)


def _prefetch() -> Any:
    """`prefetch(array, i)`: asks for the memory a kilobyte behind byte i; there may be none."""
    from llvmlite import ir
    from numba import types

    def generate(builder: Any, _: Any, arguments: Any) -> None:
        address, index = arguments
        word, byte = ir.IntType(32), ir.IntType(8).as_pointer()
        ahead = builder.add(builder.add(address, index), ir.IntType(64)(1024))
        kind = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
        function = builder.module.declare_intrinsic("llvm.prefetch", [byte], kind)
        # To read, into the nearest cache, of data.
        builder.call(function, [builder.inttoptr(ahead, byte), word(0), word(3), word(1)])

    return intrinsic_word(2, lambda array, index: types.void, generate)


def _floats() -> Any:
    """`floats(count)`: the address of `count` floats of the function's own memory; the count is a constant."""
    from llvmlite import ir
    from numba import types

    def generate(builder: Any, kinds: Any, _: Any) -> Any:
        with builder.goto_entry_block():
            held = builder.alloca(ir.ArrayType(ir.FloatType(), kinds[0].literal_value))
        held.align = 64
        return builder.ptrtoint(held, ir.IntType(64))

    return intrinsic_word(1, lambda count: types.int64, generate)


def _formats() -> Iterator[Format]:
    for name in FORMATS:
        for signed in (True, False):
            for floor in (False, True):
                yield Format(name, 8, signed, floor)


#: The makers of words.
WORDS: Mapping[str, Callable[[], Any]] = {
    "floats": _floats, "clear": _clear, "prefetch": _prefetch, "int32": partial(of_numba, "int32"),
    **{side: partial(_largest, side) for side in ("size", "above", "below")},
    **{f"{way}_{traits(form)}": partial(word, form) for form in _formats()
       for way, word in (("unit", _unit_of), ("decode", _decode), ("scale", _scale), ("factor", _factor),
                         ("encode", _encode))},
    **{f"{way}_last_{traits(form)}": partial(word, form, False) for form in _formats() if form.bits == 4
       for way, word in (("decode", _decode), ("encode", _encode))},
}  # fmt: skip

NAMES = frozenset(WORDS)

__getattr__ = made_once(__name__, WORDS)
