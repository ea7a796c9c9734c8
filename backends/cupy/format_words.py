"""States in codes in CUDA C: functions by which the threads of a block decode and encode their neighbouring elements.

They equal `rulec.formats` bit for bit. A thread has some elements of one block of the format; the threads of such a
block find its largest magnitude together, over bits, as magnitudes of floats grow with their bits.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from rulec.formats import Format, reach, table

from ..common.text import filled
from ..cstyle.element import literal
from ..cstyle.format_words import below_table, constants, function_name, looks_up, nearest, unit, value
from .plan import THREADS
from .words import DIALECT

_DECODE = """\
// The values of the thread's count elements from element i on. Whole says that the codes are moved at once.
template <int wide> FUNCTION void decode_NAME(
    const CODE_t *codes, const float *scales, int64_t i, int count, bool whole, float (&values)[wide])
{
    const float unit = count > 0 ? scales[i / BLOCK] * UNIT : 0.0f;
    Codes<CODE_t, wideWIDTH> code;
    if (whole) {
        code = *reinterpret_cast<const Codes<CODE_t, wideWIDTH> *>(codes + iWIDTH);
    } else {
#pragma unroll
        for (int e = 0; e < wideWIDTH; ++e)
            code.at[e] = eTIMES < count ? codes[iWIDTH + e] : 0;
    }
#pragma unroll
    for (int e = 0; e < wide; ++e)
        values[e] = VALUE * unit;
}
"""

_ENCODE = """\
// Stores the thread's count elements from element i on. All threads of the block call it, for they share scales.
template <int wide> FUNCTION void encode_NAME(
    CODE_t *codes, float *scales, int64_t i, int count, bool whole, const float (&values)[wide])
{
SIZES
    const bool finite = FINITE;
    float scale = MOST;
    scale = scale < SMALLEST ? SMALLEST : scale > 3.4028235e38f ? 3.4028235e38f : scale;
    const float inverse = finite ? LARGEST / scale : 0.0f;
    if (count > 0 && i % BLOCK == 0)
        scales[i / BLOCK] = finite ? scale : NAN;
    Codes<CODE_t, wideWIDTH> code;
CODES
    if (whole) {
        *reinterpret_cast<Codes<CODE_t, wideWIDTH> *>(codes + iWIDTH) = code;
    } else {
#pragma unroll
        for (int e = 0; e < wideWIDTH; ++e)
            if (eTIMES < count)
                codes[iWIDTH + e] = code.at[e];
    }
}
"""

#: The lowest float32, in place of -infinity, which is no constant of CUDA C: every value exceeds it too.
_LOWEST = "-3.4028235e38f"

#: The bits of the largest magnitude of a block, where codes reach as far below zero as above, or not below zero at all:
#: there a finite value below zero counts as zero.
_ONE_SIZE = """\
    uint32_t most = 0;
#pragma unroll
    for (int e = 0; e < wide; ++e) {
        const uint32_t bits = e < count ? bits_of(values[e]) : 0, size = SIZE;
        most = size > most ? size : most;
    }
    most = over_format<BLOCK / wide>(most);"""

#: The same above and below zero.
_TWO_SIZES = """\
    uint32_t positive = 0, negative = 0;
#pragma unroll
    for (int e = 0; e < wide; ++e) {
        const uint32_t bits = e < count ? bits_of(values[e]) : 0, size = bits & 0x7fffffff;
        positive = bits >> 31 || size < positive ? positive : size;
        negative = bits >> 31 && size > negative ? size : negative;
    }
    positive = over_format<BLOCK / wide>(positive);
    negative = over_format<BLOCK / wide>(negative);"""

#: The scale then, before its bounds.
_MOST = "negative >= positive ? float_of(negative) / REACH : float_of(positive)"

_BYTES = """\
#pragma unroll
    for (int e = 0; e < wide; ++e)
        code.at[e] = (CODE_t)(finite && e < count ? code_NAME(values[e], inverse) : 0);"""

_PAIRS = """\
#pragma unroll
    for (int e = 0; e < wide; e += 2) {
        const uint32_t upper = code_NAME(finite && e < count ? values[e] : 0.0f, inverse);
        const uint32_t lower = finite && e + 1 < count ? code_NAME(values[e + 1], inverse) : 0;
        code.at[e / 2] = (uint8_t)(finite ? upper << 4 | lower : 0);
    }"""

_CODES = """\
// Neighbouring codes, moved at once.
template <typename T, int count> struct alignas(count) Codes {
    T at[count];
};
"""

_OVER_FORMAT = f"""\
// The largest number of this many neighbouring threads, for each of them.
template <int threads> __device__ inline uint32_t over_format(uint32_t most)
{{
#pragma unroll
    for (int step = 1; step < (threads < 32 ? threads : 32); step *= 2) {{
        const uint32_t other = __shfl_xor_sync(0xffffffff, most, step);
        most = other > most ? other : most;
    }}
    if (threads <= 32)
        return most;
    __shared__ uint32_t warps[{THREADS // 32}];
    if (threadIdx.x % 32 == 0)
        warps[threadIdx.x / 32] = most;
    __syncthreads();
    const unsigned first = threadIdx.x / threads * (threads / 32);
#pragma unroll
    for (int warp = 0; warp < threads / 32; ++warp)
        most = warps[first + warp] > most ? warps[first + warp] : most;
    __syncthreads();
    return most;
}}
"""


def format_functions(formats: Iterable[Format], text: str) -> list[str]:
    """The tables and functions of these formats in the calls of a text, each once."""
    called = [form for form in dict.fromkeys(formats) if f"code_{function_name(form)}(" in text]
    texts = [part for form in called for part in _functions(form, text)]
    shared = [_OVER_FORMAT] * any("over_format<" in part for part in texts)
    return [_CODES, *shared, *texts] if texts else []


def _functions(form: Format, text: str) -> list[str]:
    stored = f"encode_{function_name(form)}(" in text
    loaded = f"decode_{function_name(form)}(" in text
    return [
        *[_values(form)] * (loaded and looks_up(form)), *[_decode(form)] * loaded,
        *[*below_table(form, DIALECT, _LOWEST), nearest(form, DIALECT), _encode(form)] * stored,
    ]  # fmt: skip


def _values(form: Format) -> str:
    """The table of the values of codes, as bits: NaN and infinity are no constants of CUDA C."""
    bits = [f"0x{x:08x}" for x in table(form).view(np.uint32)]
    return constants(DIALECT, "uint32_t", f"table_{function_name(form)}", bits)


def _decode(form: Format) -> str:
    number = value(form, "(code.at[e / 2] >> (e % 2 ? 0 : 4) & 15)" if form.bits == 4 else "code.at[e]")
    number = f"float_of({number})" if looks_up(form) else number
    return filled(_DECODE, {"VALUE": number, "UNIT": unit(form), **_common(form)})


def _encode(form: Format) -> str:
    one = reach(form) == 1
    return filled(_ENCODE, {
        "CODES": _PAIRS if form.bits == 4 else _BYTES, "SIZES": _ONE_SIZE if one else _TWO_SIZES,
        "FINITE": f"{'most' if one else 'positive'} < 0x7f800000{' && negative < 0x7f800000' * (not one)}",
        "MOST": "float_of(most)" if one else _MOST, "REACH": literal(float(reach(form)), "f"),
        "SIZE": f"{'' if form.signed else 'bits >> 31 && bits < 0xff800000 ? 0 : '}bits & 0x7fffffff",
        "SMALLEST": literal(form.smallest_scale, "f"), "LARGEST": literal(form.largest, "f"), **_common(form),
    })  # fmt: skip


def _common(form: Format) -> dict[str, object]:
    """The marks of both functions. Of four bits, a byte has two codes."""
    halves = form.bits == 4
    return {
        "FUNCTION": DIALECT.function, "NAME": function_name(form), "BLOCK": form.block, "CODE": form.code_dtype,
        "WIDTH": " / 2" * halves, "TIMES": " * 2" * halves,
    }  # fmt: skip
