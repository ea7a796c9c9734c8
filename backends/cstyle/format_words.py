"""States in codes, in languages of the C family: functions that decode and encode neighbouring blocks of one format.

They equal `rulec.formats` bit for bit. Loops over a block have no branch, so they can be vectors: the largest magnitude
is taken over bits, as magnitudes of floats grow with their bits, and whole numbers are rounded by a sum with 1.5*2**23.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence

import numpy as np

from rulec.backend.printer import unique_name
from rulec.compiler.layout import Layout, scale_name
from rulec.formats import Format, lines, reach, steps, table, zero
from rulec.formats.tables import FLOAT8

from ..common.text import filled
from .dialect import WIDTH, Dialect
from .element import literal

_DECODE = """\
/* The values of count elements of one block, where `unit` is the value of 1. */
FUNCTION void values_NAME(const CODE_t *codes, float unit, int64_t count, float *values)
{
LOOP
}

/* The values of count elements: of some of a block, or of whole blocks and perhaps a short last one. */
FUNCTION void decode_NAME(const CODE_t *codes, const float *scales, int64_t count, float *values)
{
    for (int64_t first = 0; first < count; first += BLOCK) {
        const int64_t some = count - first < BLOCK ? count - first : BLOCK;
        values_NAME(codes + FIRST, scales[first / BLOCK] * UNIT, some, values + first);
    }
}
"""

_VALUE = """\
#pragma omp simd
    for (int64_t i = 0; i < count; i++)
        values[i] = VALUE * unit;"""

_VALUES_OF_BYTES = """\
#pragma omp simd
    for (int64_t i = 0; i < count / 2; i++) {
        values[2 * i] = UPPER * unit;
        values[2 * i + 1] = LOWER * unit;
    }
    if (count % 2 != 0) {
        const int64_t i = count / 2;
        values[count - 1] = UPPER * unit;
    }"""

_ENCODE = """\
/* The scale of a block of this many elements: NaN where one is not finite. */
FUNCTION float scale_NAME(int64_t count, const float *values)
{
MOST
    const float scale = most < SMALLEST ? SMALLEST : most > 3.4028235e38f ? 3.4028235e38f : most;
    return finite ? scale : NAN;
}

/* The codes of a block of this many elements. */
FUNCTION void codes_NAME(CODE_t *codes, float scale, int64_t count, const float *values)
{
    if (scale != scale) {
        for (int64_t i = 0; i < BYTES; i++)
            codes[i] = 0;
        return;
    }
    const float inverse = LARGEST / scale;
LOOP
}

/* The codes and scales of count elements, of whole blocks and perhaps a short last one. Scales come first, so that a
 * processor works on several blocks at a time. */
FUNCTION void encode_NAME(CODE_t *codes, float *scales, int64_t count, const float *values)
{
    const int64_t whole = count / BLOCK * BLOCK;
    for (int64_t first = 0; first < whole; first += BLOCK)
        scales[first / BLOCK] = scale_NAME(BLOCK, values + first);
    for (int64_t first = 0; first < whole; first += BLOCK)
        codes_NAME(codes + FIRST, scales[first / BLOCK], BLOCK, values + first);
    if (whole < count) {
        scales[whole / BLOCK] = scale_NAME(count - whole, values + whole);
        codes_NAME(codes + LAST, scales[whole / BLOCK], count - whole, values + whole);
    }
}
"""

#: The largest magnitude.
_MAGNITUDE = """\
    int32_t size = 0;
#pragma omp simd reduction(max : size)
    for (int64_t i = 0; i < count; i++) {
        const int32_t bits = (int32_t)(bits_of(values[i]) & 0x7fffffff);
        size = bits > size ? bits : size;
    }
    const bool finite = size < 0x7f800000;
    const float most = float_of((uint32_t)size);"""

#: The scale before its bounds where the two sides differ. The bits of negative floats are the larger ones.
_SIDES = """\
    int32_t positive = 0;
    uint32_t bits = 0;
#pragma omp simd reduction(max : positive, bits)
    for (int64_t i = 0; i < count; i++) {
        const uint32_t each = bits_of(values[i]);
        positive = (int32_t)each > positive ? (int32_t)each : positive;
        bits = each > bits ? each : bits;
    }
    const int32_t negative = bits >> 31 ? (int32_t)(bits & 0x7fffffff) : 0;
    const bool finite = positive < 0x7f800000 && negative < 0x7f800000;
    const float most = SCALE;"""

_CODE = """\
#pragma omp simd
    for (int64_t i = 0; i < count; i++)
        codes[i] = (CODE_t)code_NAME(values[i], inverse);"""

_BYTES_OF_CODES = """\
    uint32_t each[BLOCK + 1];
#pragma omp simd
    for (int64_t i = 0; i < count; i++)
        each[i] = code_NAME(values[i], inverse);
    each[count] = 0;
#pragma omp simd
    for (int64_t i = 0; i < (count + 1) / 2; i++)
        codes[i] = (uint8_t)(each[2 * i] << 4 | each[2 * i + 1]);"""

#: The code of x in a block with this inverse, as an integer of which the lower bits count.
_NEAREST = """\
FUNCTION uint32_t code_NAME(float x, float inverse)
{
    const float y = OPERAND * inverse;
NEAREST
}
"""

_RINT = "bits_of({} + 12582912.0f)"

#: Coding -> the code of y.
_CODES = {
    "number": _RINT.format("y"), "root": _RINT.format("sqrtf(y) * 255.0f") + " & 0xff",
    "softsign": _RINT.format("(y + y) / (1.0f + fabsf(y)) * 127.0f"),
}  # fmt: skip

_FLOAT8 = """\
    const uint32_t bits = bits_of(y), size = bits & 0x7fffffff;
    const uint32_t normal = ((size + HALF + (size >> DROP & 1)) >> DROP) - BIAS;
    const uint32_t small = bits_of(float_of(size) + POWER) - bits_of(POWER);
    const uint32_t code = (size < LEAST ? small : normal) | (bits >> 24 & 0x80);"""

#: The value of a code of "softsign" where the unit is 1: a division takes less than a look into 1 kB where these are
#: taken one by one.
_SOFTSIGN = """\
FUNCTION float value_NAME(int8_t code)
{
    const float t = (float)code * ROOT;
    return t / (2.0f - fabsf(t));
}
"""

_LINES = """\
    const float size = SIZE;
    float place = FIRST_LINE;
OTHER_LINES
    const int32_t step = (int32_t)bits_of(place + 12582912.0f) - 0x4b400000;
    const int32_t index = PLACE + INDEX;
    const uint32_t code = (uint32_t)(index - (y > BELOW ? 0 : 1));"""


#: By `rulec.formats.Steps.entries`. An index of 64 bits keeps compilers from gathers, which are slower than loads.
_CELLS = """\
    const uint32_t bits = bits_of(y), sign = SIGN;
    const int32_t size = (int32_t)(bits & 0x7fffffff);
    const uint32_t from = (uint32_t)((size > LOWEST ? size : LOWEST) - LOWEST), low = from & MASK;
    const uint32_t entry = cells_NAME[(uint64_t)((from >> SHIFT) + (sign & COUNT))];
    const uint32_t code = (entry + ((low ^ sign) - sign)) >> SHIFT;"""


class CodedNames:
    """The variables of states in codes, by state: of their codes; and by `scale_name`: of their scales."""

    def __init__(self, layout: Layout, taken: set[str]) -> None:
        states = [name for name, _ in layout.formats]
        self.codes = {name: unique_name(f"{name}_codes", taken) for name in states}
        self.scales = {scale_name(name): unique_name(f"{name}_scale", taken) for name in states}


def function_name(form: Format) -> str:
    """The part of the names of functions and tables that is for a format."""
    return re.sub(r"\W", "_", form.key)


def format_functions(formats: Iterable[Format], dialect: Dialect) -> list[str]:
    """The tables and functions of these formats, each once."""
    return [text for form in dict.fromkeys(formats) for text in _functions(form, dialect)]


def _functions(form: Format, dialect: Dialect) -> list[str]:
    pairs = form.bits == 4
    common = {
        "FUNCTION": dialect.function, "NAME": function_name(form), "BLOCK": form.block, "CODE": form.code_dtype,
        "FIRST": "first / 2" if pairs else "first", "BYTES": "(count + 1) / 2" if pairs else "count",
    }  # fmt: skip
    decode = filled(_DECODE, {
        "LOOP": _VALUES_OF_BYTES if pairs else _VALUE, "VALUE": _value(form, "codes[i]"),
        "UPPER": _value(form, "(codes[i] >> 4)"), "LOWER": _value(form, "(codes[i] & 15)"), "UNIT": unit(form),
        **common,
    })  # fmt: skip
    encode = filled(_ENCODE, {
        "MOST": _most(form), "LOOP": _BYTES_OF_CODES if pairs else _CODE,
        "SMALLEST": literal(form.smallest_scale, "f"), "LARGEST": literal(form.largest, "f"),
        "LAST": "whole / 2" if pairs else "whole", **common,
    })  # fmt: skip
    softsign = filled(_SOFTSIGN, {"ROOT": _number(np.float32(1) / np.float32(127)), **common})
    code = _by_cells(form, dialect) if _has_cells(form) else nearest(form, dialect)
    return [*_tables(form, dialect), *[softsign] * _is_softsign(form), decode, code, encode]


def nearest(form: Format, dialect: Dialect) -> str:
    """The function `code_NAME` of a format: the code of x, not NaN, in a block with this `inverse`."""
    return filled(_NEAREST, {
        "NEAREST": _nearest(form), "OPERAND": "x" if form.signed else "(x > 0 ? x : 0)",
        "FUNCTION": dialect.function, "NAME": function_name(form),
    })  # fmt: skip


def _by_cells(form: Format, dialect: Dialect) -> str:
    """The same function, by one look into a table of cells."""
    look, none = steps(form), zero(form) if form.floor else None
    sign = "(uint32_t)((int32_t)bits >> 31)" if none is None else "x < 0 ? UINT32_MAX : 0"
    code = filled(_CELLS, {
        "SIGN": sign if form.signed else "0", "LOWEST": look.low << look.shift, "MASK": (1 << look.shift) - 1,
        "SHIFT": look.shift, "COUNT": look.cells,
    })  # fmt: skip
    is_none = "0" if none is None else "(x == 0 ? 1 : 0)" if form.signed else "(x > 0 ? 0 : 1)"
    return filled(_NEAREST, {
        "NEAREST": f"{code}\n    return code - {is_none};", "OPERAND": "x" if form.signed else "(x > 0 ? x : 0)",
        "FUNCTION": dialect.function, "NAME": function_name(form),
    })  # fmt: skip


def _has_cells(form: Format) -> bool:
    """Whether codes come from a table of cells."""
    return form.coding == "thresholds" and not _is_even(form)


def value(form: Format, code: str) -> str:
    """The value of a code where the unit is 1: by arithmetic where that is short, else from a table."""
    if form.coding == "number":
        return f"(float){code}"
    if form.coding == "root":
        root = f"((float){code} * {_number(np.float32(1) / np.float32(255))})"
        return f"{root} * {root}"
    if _is_even(form):
        return f"(float)({code} + 1) * 0.0625f"
    return f"table_{function_name(form)}[(uint8_t){code}]"


def _value(form: Format, code: str) -> str:
    """The value as `value` has it, or from a function; an index of 64 bits is that of `_CELLS`."""
    if _is_softsign(form):
        return f"value_{function_name(form)}({code})"
    return f"table_{function_name(form)}[(uint64_t){code}]" if looks_up(form) else value(form, code)


def _is_softsign(form: Format) -> bool:
    return form.coding == "softsign"


def unit(form: Format) -> str:
    """The factor from the scale of a block to the unit of its values."""
    return _number(np.float32(1) / np.float32(form.largest))


def _most(form: Format) -> str:
    """The statements for the scale of a block before its bounds, and for whether all values are finite."""
    if not form.signed:
        return _SIDES.replace("SCALE", "float_of((uint32_t)positive)")
    limit = float(reach(form))
    if limit == 1:
        return _MAGNITUDE
    below = f"float_of((uint32_t)negative) / {literal(limit, 'f')}"
    return _SIDES.replace("SCALE", f"negative >= positive ? {below} : float_of((uint32_t)positive)")


def _nearest(form: Format) -> str:
    """The statements that return the code of y."""
    if form.coding == "thresholds":
        code = _lines(form)
    elif form.coding == "float8":
        code = _float8(form)
    else:
        code = f"    const uint32_t code = {_CODES[form.coding]};"
    none = zero(form)
    if form.floor and none is not None:
        return f"{code}\n    return x > 0 && (code & 0xff) == {none} ? {none + 1} : code;"
    return f"{code}\n    return code;"


def _float8(form: Format) -> str:
    kind = FLOAT8[form.name]
    drop = 23 - kind.mantissa
    return filled(_FLOAT8, {
        "HALF": (1 << (drop - 1)) - 1, "DROP": drop, "BIAS": (127 - kind.bias) << kind.mantissa,
        "POWER": literal(2.0 ** (24 - kind.bias - kind.mantissa), "f"),
        "LEAST": np.float32(2.0 ** (1 - kind.bias)).view(np.uint32),
    })  # fmt: skip


def _lines(form: Format) -> str:
    look, even = lines(form), _is_even(form)
    (slope, start), *others = [map(_number, line) for line in look.lines]
    places = [f"place = lower_line(place, {slope}, size, {start});" for slope, start in others]
    places += ["place = place > 0 ? place : 0;"] * even
    return filled(_LINES, {
        "FIRST_LINE": f"line_at({slope}, size, {start})", "OTHER_LINES": "\n".join(f"    {line}" for line in places),
        "SIZE": "fabsf(y)" if form.signed else "y", "INDEX": look.first,
        "PLACE": "(step ^ (int32_t)bits_of(y) >> 31)" if form.signed else "step",
        "BELOW": "(float)index * 0.0625f + 0.03125f" if even else f"below_{function_name(form)}[index]",
    })  # fmt: skip


def _tables(form: Format, dialect: Dialect) -> list[str]:
    """The tables that the functions of a format read."""
    name, texts = function_name(form), []
    if looks_up(form) and not _is_softsign(form):
        texts.append(constants(dialect, "float", f"table_{name}", [_number(x) for x in table(form)]))
    if _has_cells(form):
        entries = steps(form).entries(zero(form) if form.floor else None)
        texts.append(constants(dialect, "uint32_t", f"cells_{name}", [f"{x:#x}" for x in entries]))
    return texts


def below_table(form: Format, dialect: Dialect, lowest: str) -> list[str]:
    """The table of the function `code_NAME` of a format, if it has one; it begins with the number `lowest`."""
    if form.coding != "thresholds" or _is_even(form):
        return []
    limits = [lowest, *map(_number, lines(form).below[1:])]
    return [constants(dialect, "float", f"below_{function_name(form)}", limits)]


def _is_even(form: Format) -> bool:
    """Whether the thresholds are evenly spaced."""
    return form.bits == 4 and not form.signed


def looks_up(form: Format) -> bool:
    """Whether values come from a table."""
    return value(form, "").startswith("table_")


def _number(value: np.float32) -> str:
    return literal(float(value), "f")


def constants(dialect: Dialect, kind: str, name: str, items: Sequence[str]) -> str:
    """A table of constants."""
    body = textwrap.fill(", ".join(items), WIDTH - 4, initial_indent="    ", subsequent_indent="    ")
    return f"{dialect.table} {kind} {name}[{len(items)}] = {{\n{body}\n}};\n"
