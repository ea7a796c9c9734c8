"""Functions of arrays that files of their own print: formats of small states, and operations on the bits of numbers.

The text is the definition of `rulec.formats` and `rulec.array_api.bits` in calls that NumPy and JAX both have. `xp`
stands for the library, and is replaced by its name in the file.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from rulec.array_api.bits import GOLDEN, MIXING, NUMBERS
from rulec.formats import Format, reach, table, thresholds, zero
from rulec.formats import tables as float8

_BITS: Mapping[str, str] = {
    "away": '''\
def away(x, count):
    """x moved away from zero by a count of ulps of float32, or towards zero by a negative one."""
    return (x.astype(xp.float32).view(xp.int32) + count.astype(xp.int32)).view(xp.float32)
''',
    "ulps": '''\
def ulps(x, y):
    """The ulps of float32 from y away from zero to x, of one sign; 0 where x is NaN."""
    count = x.astype(xp.float32).view(xp.int32) - y.astype(xp.float32).view(xp.int32)
    return xp.where(x == x, count, 0).astype(xp.float32)
''',
    "coarse": '''\
def coarse(x, count):
    """x moved away from zero by a count of ulps, its lowest 16 bits cleared; x where it is not finite."""
    moved = (x.astype(xp.float32).view(xp.int32) + count.astype(xp.int32)) & xp.int32(-65536)
    return xp.where(xp.isfinite(x), moved.view(xp.float32), x.astype(xp.float32))
''',
    "chance": f'''\
def mixed(x):
    """Each bit of a uint32 in all bits of the result (lowbias32, Chris Wellons)."""
    x = (x ^ (x >> xp.uint32({MIXING[0][0]}))) * xp.uint32({MIXING[0][1]:#x})
    x = (x ^ (x >> xp.uint32({MIXING[1][0]}))) * xp.uint32({MIXING[1][1]:#x})
    return x ^ (x >> xp.uint32({MIXING[2][0]}))


def chance(x, *words):
    """A random whole number below 2**16 for each element of x.

    It follows from the element's place and the words: two halves of the seed, the number of the array, the step, and
    the number of the draw.
    """
    if x.size > 2**32:
        raise ValueError(f"random bits are for arrays of at most 2**32 elements, and one has {{x.size}}")
    seed_low, seed_high, number, step, draw = (word.astype(xp.uint32) for word in words)
    golden = xp.uint32({GOLDEN:#x})
    stream = mixed(number + draw * xp.uint32({NUMBERS})) ^ (seed_low + seed_high * xp.uint32(65536))
    stream = mixed(stream)
    first, second = mixed(stream ^ step), mixed(stream * golden + step)
    counter = xp.arange(x.size, dtype=xp.uint32) * golden + first
    counter = (counter ^ (counter >> xp.uint32({MIXING[0][0]}))) * xp.uint32({MIXING[0][1]:#x}) + second
    counter = (counter ^ (counter >> xp.uint32({MIXING[1][0]}))) * xp.uint32({MIXING[1][1]:#x})
    return (counter >> xp.uint32({MIXING[2][0]})).astype(xp.float32).reshape(x.shape)
''',
}


def bit_words(module: str) -> dict[str, str]:
    """The operations on bits by name, as text for a library called `module`."""
    return {name: _spelled(text, module) for name, text in _BITS.items()}


def code_functions(name: str, form: Format, module: str, flushes: bool) -> list[str]:
    """The lines of the tables and of `encode_NAME` and `decode_NAME` for a state in this format.

    `flushes` says that the library may take numbers below 2**-126 for zero.
    """
    told = f"The value of each code of {form.text}."
    tables = [] if _is_plain(form) else _table(f"TABLE_{name}", told, table(form))
    if form.coding == "thresholds":
        told = "A value's code is the number of these below it."
        tables += ["", *_table(f"LIMITS_{name}", told, thresholds(form))]
    lines = [*_decode(name, form), "", "", *_encode(name, form, flushes)]
    return [*tables, *["", ""] * bool(tables), *(_spelled(line, module) for line in lines)]


def _spelled(text: str, module: str) -> str:
    return re.sub(r"\bxp\.", f"{module}.", text)


def _number(value: float | np.float32) -> str:
    """One number in float32, exactly."""
    text = repr(float(value))
    return f"xp.float32({text})" if np.isfinite(value) else f'xp.float32("{text}")'


def _table(name: str, told: str, numbers: NDArray[np.float32]) -> list[str]:
    """The statement for a table, which is NumPy's in every file."""
    texts = (repr(float(x)) if np.isfinite(x) else f'float("{float(x)}")' for x in numbers)
    rows = textwrap.wrap(", ".join(texts), 110, break_on_hyphens=False)
    return [f"#: {told}", f"{name} = np.array([", *(f"    {row}" for row in rows), "], np.float32)"]


def _is_plain(form: Format) -> bool:
    """Whether codes are numbers themselves."""
    return form.name == "int8" and form.signed


def _decode(name: str, form: Format) -> list[str]:
    """The function of codes, scales and a shape."""
    values = "codes.reshape(-1).astype(xp.float32)"
    if not _is_plain(form):
        values = f"xp.take(TABLE_{name}, codes.reshape(-1).view(xp.uint8).astype(xp.int32))"
    halves = ["    codes = xp.stack([codes >> 4, codes & 15], axis=-1).reshape(-1)[:count]"] * (form.bits == 4)
    return [
        f"def decode_{name}(codes, scales, shape):",
        f'    """float32 values of this shape, of codes in {form.text} and a scale for each block."""',
        "    count = math.prod(shape)",
        *halves,
        f"    unit = scales * {_number(np.float32(1) / np.float32(form.largest))}",
        f"    values = {values}",
        f"    return (values * xp.repeat(unit, {form.block})[:count]).reshape(shape)",
    ]


def _encode(name: str, form: Format, flushes: bool) -> list[str]:
    """The function of float32 values, for their codes and scales."""
    kept = "finite" if form.signed else "finite & (x > 0)"
    lines = [
        f'"""Codes in {form.text} of float32 values, and a scale for each block of {form.block} neighbours."""',
        f"x = xp.pad(values.reshape(-1), (0, -values.size % {form.block})).reshape(-1, {form.block})",
        "finite = xp.isfinite(x).all(axis=1, keepdims=True)",
        f"x = xp.where({kept}, x, {_number(0.0)})",
        *_scale(form),
        *_quotient(form, flushes),
        *_nearest(name, form),
    ]
    if form.floor and zero(form) is not None:
        lines.append(f"code = xp.where((x > 0) & (code == {zero(form)}), code + 1, code)")
    lines += [
        f"codes = xp.where(finite, code, 0).astype(xp.{form.code_dtype}).reshape(-1)[: values.size]",
        f"scales = xp.where(finite, scale, {_number(np.nan)}).reshape(-1)",
    ]
    if form.bits == 4:
        lines.append("pairs = xp.pad(codes, (0, values.size % 2)).reshape(-1, 2)")
        lines.append("return pairs[:, 0] << 4 | pairs[:, 1], scales")
    else:
        lines.append("return codes.reshape(values.shape), scales")
    return [f"def encode_{name}(values):", *(f"    {line}" for line in lines)]


def _scale(form: Format) -> list[str]:
    """The statements for the scale of each row, as a column."""
    lines = ["scale = x.max(axis=1, keepdims=True, initial=0)"]
    if form.signed:
        lines.append("negative = -x.min(axis=1, keepdims=True, initial=0)")
        lines.append("below = negative >= scale")
        # A compiler would multiply by the reciprocal of a divisor that it knows.
        over = "" if reach(form) == 1 else f" / xp.where(below, {_number(reach(form))}, {_number(1.0)})"
        lines.append(f"scale = xp.where(below, negative, scale){over}")
    ends = f"{_number(form.smallest_scale)}, {_number(np.finfo(np.float32).max)}"
    return [*lines, f"scale = xp.clip(scale, {ends})"]


def _quotient(form: Format, flushes: bool) -> list[str]:
    """The statements for the values where the scale is `largest`."""
    if not flushes:
        return [f"y = x * ({_number(form.largest)} / scale)"]
    # A quotient below 2**-126 may become zero; a power of two on both sides changes no digit.
    power = "xp.where(scale > xp.float32(2.0**100), xp.float32(2.0**-32), xp.float32(1.0))"
    return [f"power = {power}", f"y = x * power * ({_number(form.largest)} / (scale * power))"]


def _nearest(name: str, form: Format) -> list[str]:
    """The statements for the code of each y, as an integer whose lower eight bits are the code's."""
    if form.coding == "thresholds":
        return [f'code = xp.searchsorted(LIMITS_{name}, y, side="left")']
    if form.coding == "float8":
        return _float8(float8.FLOAT8[form.name])
    rounded = {
        "number": "y", "root": f"xp.sqrt(y) * {_number(255.0)}",
        "softsign": f"(y + y) / ({_number(1.0)} + xp.abs(y)) * {_number(127.0)}",
    }  # fmt: skip
    return [f"code = xp.rint({rounded[form.coding]}).astype(xp.int32)"]


def _float8(kind: float8.Float8) -> list[str]:
    """The statements for the bits of the nearest float of eight bits, ties to even."""
    drop, power = 23 - kind.mantissa, np.float32(2.0 ** (24 - kind.bias - kind.mantissa))
    return [
        "size = xp.abs(y)",
        "bits = size.view(xp.uint32)",
        f"carried = bits + xp.uint32({(1 << (drop - 1)) - 1}) + (bits >> {drop} & 1)",
        f"normal = (carried >> {drop}).astype(xp.int32) - {(127 - kind.bias) << kind.mantissa}",
        f"small = (size + {_number(power)}).view(xp.int32) - {int(power.view(np.int32))}",
        f"code = xp.where(size < {_number(2.0 ** (1 - kind.bias))}, small, normal)",
        "code = code + (y.view(xp.uint32) >> 31).astype(xp.int32) * 128",
    ]
