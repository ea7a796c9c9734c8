"""States in codes as Triton source: functions that decode and encode a block of elements of one format.

They equal `rulec.formats` bit for bit, in float32 without contraction. The magnitudes of floats grow with their bits,
so the largest one of each block of the format is taken over whole numbers. Whole numbers are rounded by a sum with
1.5*2**23. A table of a format, with its values and its cells, lies in the memory of the device.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import numpy as np

from rulec.formats import Format, lines, reach, steps, table, zero
from rulec.formats.tables import FLOAT8, Floats

from ..common.text import filled

_DECODE = '''\
@triton.jit
def decode_NAME(
    codes, scales, words, start, size, ALL: tl.constexpr, BLOCK: tl.constexpr
):
    """The values of the BLOCK elements from `start` on."""
    i = tl.arange(0, BLOCK)
    inside = None if ALL else i < size - start
    group = tl.arange(0, BLOCK // GROUP)
    known = None if ALL else group * GROUP < size - start
    unit = tl.load(scales + start // GROUP + group, mask=known) * UNIT
LOAD
    number = VALUE
    return number * spread(unit, GROUP, BLOCK)
'''

_BYTE = "    code = tl.load(codes + start + i, mask=inside)"
_HALF_BYTE = """\
    both = tl.load(codes + start // 2 + i // 2, mask=inside).to(tl.int32)
    code = (both >> tl.where(i % 2 == 0, 4, 0)) & 15"""

_ENCODE = '''\
@triton.jit
def encode_NAME(
    codes, scales, words, values, start, size, write, ALL: tl.constexpr, BLOCK: tl.constexpr
):
    """Stores the BLOCK elements from `start` on, if `write` is None or true."""
    i = tl.arange(0, BLOCK)
    x = values if ALL else tl.where(i < size - start, values, 0.0)
    bits = x.to(tl.int32, bitcast=True)
SCALE
    scale = tl.minimum(tl.maximum(top, SMALLEST), 3.4028234663852886e38)
    inverse = tl.where(finite, tl.div_rn(tl.full((BLOCK // GROUP,), LARGEST, tl.float32), scale), 0.0)
    group = tl.arange(0, BLOCK // GROUP)
    known = None if ALL else group * GROUP < size - start
    stored = known if write is None else (write if ALL else known & write)
    tl.store(scales + start // GROUP + group, tl.where(finite, scale, float("nan")), mask=stored)
    y = x * spread(inverse, GROUP, BLOCK)
NEAREST
    code = tl.where(spread(finite.to(tl.int32), GROUP, BLOCK) != 0, code, 0)
STORE
'''

_SPREAD = '''\
@triton.jit
def spread(x, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """A number for each of the GROUP elements that share it."""
    return tl.reshape(tl.broadcast_to(x[:, None], (BLOCK // GROUP, GROUP)), (BLOCK,))
'''

#: The largest magnitude of a block, where codes reach as far below zero as above.
_EVEN = """\
    most = tl.max(tl.reshape(bits & 0x7FFFFFFF, (BLOCK // GROUP, GROUP)), 1)
    finite = most < 0x7F800000
    top = most.to(tl.float32, bitcast=True)"""

#: Where they do not reach below zero: there a finite value counts as zero. Of a number with a sign, bits are negative.
_UNSIGNED = """\
    finite = tl.max(tl.reshape(bits & 0x7FFFFFFF, (BLOCK // GROUP, GROUP)), 1) < 0x7F800000
    bits = tl.maximum(bits, 0)
    x = bits.to(tl.float32, bitcast=True)
    top = tl.max(tl.reshape(bits, (BLOCK // GROUP, GROUP)), 1).to(tl.float32, bitcast=True)"""

#: Where they reach less far below zero.
_UNEVEN = """\
    positive = tl.maximum(tl.max(tl.reshape(bits, (BLOCK // GROUP, GROUP)), 1), 0)
    negative = tl.maximum(tl.max(tl.reshape(bits ^ -0x80000000, (BLOCK // GROUP, GROUP)), 1), 0)
    finite = tl.maximum(positive, negative) < 0x7F800000
    below = tl.div_rn(negative.to(tl.float32, bitcast=True), tl.full((BLOCK // GROUP,), REACH, tl.float32))
    top = tl.where(negative >= positive, below, positive.to(tl.float32, bitcast=True))"""

_STORE_BYTES = """\
    inside = None if ALL else i < size - start
    stored = inside if write is None else (write if ALL else inside & write)
    tl.store(codes + start + i, code.to(tl.CODE), mask=stored)"""
_STORE_PAIRS = """\
    code = code if ALL else tl.where(i < size - start, code, 0)
    upper, lower = tl.split(tl.reshape(code, (BLOCK // 2, 2)))
    pair = tl.arange(0, BLOCK // 2)
    inside = None if ALL else 2 * pair < size - start
    stored = inside if write is None else (write if ALL else inside & write)
    tl.store(codes + start // 2 + pair, (upper << 4 | lower).to(tl.uint8), mask=stored)"""

_RINT = "    code = ({} + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000"

_FLOAT8 = """\
    bits = y.to(tl.int32, bitcast=True)
    length = bits & 0x7FFFFFFF
    normal = ((length + HALF + ((length >> DROP) & 1)) >> DROP) - BIAS
    small = (tl.abs(y) + POWER).to(tl.int32, bitcast=True) - POWER_BITS
    code = tl.where(length < LEAST, small, normal) | ((bits >> 24) & 0x80)"""

#: By the line of `rulec.formats.lookup`: thresholds are evenly spaced.
_LINE = """\
    place = tl.maximum(SLOPE * y + START, 0.0)
    index = FIRST + (place + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000
    code = index - (y <= index.to(tl.float32) * 0.0625 + 0.03125).to(tl.int32)"""

#: By `rulec.formats.Steps.entries`. The bound of the cell is for values that are not finite.
_CELLS = """\
    bits = y.to(tl.int32, bitcast=True)
    length = tl.maximum(bits & 0x7FFFFFFF, LOWEST)
    cell = tl.minimum(length >> SHIFT, LAST)
    low = length & MASK
SIGN
    code = (tl.load(words + FIRST + cell).to(tl.int32, bitcast=True) + low) >> SHIFT"""

_SIGN = """\
    sign = bits >> 31
    cell += sign & COUNT
    low = (low ^ sign) - sign"""

_LOOK = "tl.load(words + {})"


def function_name(form: Format) -> str:
    """The part of the names of functions that is for a format."""
    return re.sub(r"\W", "_", form.key)


def function_names(formats: Iterable[Format]) -> frozenset[str]:
    """The names of all functions of these formats."""
    names = {f"{way}_{function_name(form)}" for form in formats for way in ("decode", "encode")}
    return frozenset(names | {"spread"})


def format_functions(formats: Iterable[Format], text: str) -> list[str]:
    """The functions of these formats in the calls of a text, each once."""
    each = [
        source
        for form in dict.fromkeys(formats)
        for way, source in (("decode", _decode(form)), ("encode", _encode(form)))
        if f"{way}_{function_name(form)}(" in text
    ]
    return [_SPREAD, *each] if each else []


#: Coding -> the number that is rounded to the code of y.
_ROUNDED = {
    "number": "y", "root": "tl.sqrt_rn(y) * 255.0", "softsign": "tl.div_rn(y + y, 1.0 + tl.abs(y)) * 127.0"
}  # fmt: skip


def words(form: Format) -> Floats:
    """The table of a format: the values of codes, and then the entries of cells, whose bits count."""
    nothing = np.zeros(0, np.float32)
    values = table(form) if looks_up(form) else nothing
    return np.concatenate([values, steps(form).entries().view(np.float32) if has_cells(form) else nothing])


def looks_up(form: Format) -> bool:
    """Whether the values of codes come from a table; those of int8, of roots, and evenly spaced ones are computed."""
    return form.coding not in ("number", "root") and not _is_even(form)


def has_cells(form: Format) -> bool:
    """Whether the code of a value comes from the table, too."""
    return form.coding == "thresholds" and not _is_even(form)


def _is_even(form: Format) -> bool:
    """Whether values are evenly spaced, from 1/16 to 1."""
    return form.name == "dynamic4" and not form.signed


def _decode(form: Format) -> str:
    return filled(_DECODE, {
        "LOAD": _HALF_BYTE if form.bits == 4 else _BYTE, "VALUE": _value(form),
        "UNIT": _number(np.float32(1) / np.float32(form.largest)), **_names(form),
    })  # fmt: skip


def _encode(form: Format) -> str:
    limit = float(reach(form))
    return filled(_ENCODE, {
        "SCALE": _UNSIGNED if not form.signed else _EVEN if limit == 1 else _UNEVEN, "REACH": repr(limit),
        "NEAREST": _nearest(form),
        "STORE": _STORE_PAIRS if form.bits == 4 else _STORE_BYTES, "CODE": form.code_dtype,
        "SMALLEST": repr(form.smallest_scale), "LARGEST": repr(form.largest), **_names(form),
    }).replace("\n\n", "\n")  # fmt: skip


def _names(form: Format) -> dict[str, object]:
    return {"NAME": function_name(form), "GROUP": form.block}


def _value(form: Format) -> str:
    """The value of a code where the unit is 1."""
    if _is_even(form):
        return "(code + 1).to(tl.float32) * 0.0625"
    if looks_up(form):
        # A code below zero counts as the byte that it is.
        return _LOOK.format("(code.to(tl.int32) & 0xFF)")
    if form.signed:
        return "code.to(tl.float32)"
    root = f"(code.to(tl.float32) * {_number(np.float32(1) / np.float32(255))})"
    return f"{root} * {root}"


def _nearest(form: Format) -> str:
    """The statements for the variable `code`: the code of y, as an integer of which the lower bits count."""
    if has_cells(form):
        code = _cells(form)
    elif form.coding == "thresholds":
        code = _line(form)
    elif form.coding == "float8":
        code = _float8(form)
    else:
        code = _RINT.format(_ROUNDED[form.coding])
    none = zero(form)
    if form.floor and none == 0 and not form.signed:
        code += "\n    code = tl.maximum(code, tl.minimum(x.to(tl.int32, bitcast=True), 1))"
    elif form.floor and none is not None:
        code += f"\n    code = tl.where((x > 0) & ((code & 0xFF) == {none}), {none + 1}, code)"
    return code


def _float8(form: Format) -> str:
    kind = FLOAT8[form.name]
    drop, power = 23 - kind.mantissa, 2.0 ** (24 - kind.bias - kind.mantissa)
    return filled(_FLOAT8, {
        "HALF": (1 << (drop - 1)) - 1, "DROP": drop, "BIAS": (127 - kind.bias) << kind.mantissa,
        "POWER_BITS": np.float32(power).view(np.int32), "POWER": repr(power),
        "LEAST": np.float32(2.0 ** (1 - kind.bias)).view(np.int32),
    })  # fmt: skip


def _line(form: Format) -> str:
    ((slope, start),) = lines(form).lines
    return filled(_LINE, {"SLOPE": _number(slope), "START": _number(start), "FIRST": lines(form).first})


def _cells(form: Format) -> str:
    look = steps(form)
    sign = filled(_SIGN, {"COUNT": look.cells}) if form.signed else ""
    return filled(_CELLS, {
        "LOWEST": look.low << look.shift, "LAST": look.low + look.cells - 1, "MASK": (1 << look.shift) - 1,
        "SIGN": sign, "FIRST": table(form).size - look.low, "SHIFT": look.shift,
    }).replace("\n\n", "\n")  # fmt: skip


def _number(value: np.float32) -> str:
    """A float32 as text that is read as exactly this number, also by way of float64."""
    return repr(float(value))


__all__: Sequence[str] = ["format_functions", "function_name", "function_names", "words"]
