"""The fixed parts of printed CUDA C: types, reductions over a block, and CUDA's spelling of functions."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ..common.text import used
from ..cstyle.dialect import Dialect
from .plan import CHUNK, FINISH, THREADS, TILE

#: Conversions that are one instruction.
_WORDS = {
    "float_of": """\
// The float that has these bits.
__device__ inline float float_of(uint32_t bits)
{
    return __uint_as_float(bits);
}
""",
    "bits_of": """\
// The bits of a float.
__device__ inline uint32_t bits_of(float value)
{
    return __float_as_uint(value);
}
""",
    "line_at": """\
// slope*x + start, rounded once.
__device__ inline float line_at(float slope, float x, float start)
{
    return fmaf(slope, x, start);
}
""",
    "from_float16": """\
// The number that a float16 is.
__device__ inline float from_float16(uint16_t from)
{
    float to;
    asm("cvt.f32.f16 %0, %1;" : "=f"(to) : "h"(from));
    return to;
}
""",
    "to_float16": """\
// The nearest float16, halves to even.
__device__ inline uint16_t to_float16(float from)
{
    uint16_t to;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(to) : "f"(from));
    return to;
}
""",
    "to_bfloat16": """\
// The nearest bfloat16, halves to even.
__device__ inline uint16_t to_bfloat16(float from)
{
    uint16_t to;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(to) : "f"(from));
    return to;
}
""",
}

#: The types and macros of C that a text may use, each printed where it is used.
_TYPES: Mapping[str, str] = {
    "int8_t": "typedef signed char int8_t;",
    "uint8_t": "typedef unsigned char uint8_t;",
    "int16_t": "typedef short int16_t;",
    "int32_t": "typedef int int32_t;",
    "int64_t": "typedef long long int64_t;",
    "uint64_t": "typedef unsigned long long uint64_t;",
    "uint32_t": "typedef unsigned int uint32_t;",
    "uint16_t": "typedef unsigned short uint16_t;",
    "INFINITY": "#define INFINITY __int_as_float(0x7f800000)",
    "NAN": "#define NAN __int_as_float(0x7fc00000)",
}


def _struct(name: str, fields: tuple[str, ...], about: str) -> str:
    return f"// {about}\nstruct {name} {{\n    int64_t {', '.join(fields)};\n}};\n"


_ADDRESS = """\
// An address in global memory as a pointer.
template <typename T> __device__ inline T *at(int64_t address)
{
    return static_cast<T *>(__cvta_global_to_generic(address));
}
"""

_PACK = """\
// Neighbouring elements, moved 16 bytes at a time.
template <typename T, int count> struct alignas(16) Pack {
    T at[count];
};

template <int count, typename T> __device__ inline Pack<T, count> &pack(T *first)
{
    return *reinterpret_cast<Pack<T, count> *>(first);
}

template <int count, typename T> __device__ inline const Pack<T, count> &pack(const T *first)
{
    return *reinterpret_cast<const Pack<T, count> *>(first);
}
"""

_LOOSE = """\
// Neighbouring elements at any address, moved one by one.
template <int count, typename T> __device__ inline Pack<T, count> loose(const T *first)
{
    Pack<T, count> values;
#pragma unroll
    for (int e = 0; e < count; ++e)
        values.at[e] = first[e];
    return values;
}
"""

_JOINED = """\
// Joins two totals: sums, or the lower, or the higher of them.
enum Kind { SUM, LOWEST, HIGHEST };

__device__ inline double joined(int kind, double a, double b)
{
    return kind == SUM ? a + b : kind == LOWEST ? minimum(a, b) : maximum(a, b);
}
"""

_OVER_LANES = """\
// What this many neighbouring threads have, joined in an order that never changes; the first of them has it.
__device__ inline double over_lanes(int kind, double total, int lanes)
{
    for (int step = lanes / 2; step > 0; step /= 2)
        total = joined(kind, total, __shfl_down_sync(0xffffffff, total, step));
    return total;
}
"""

_OVER_BLOCK = f"""\
// What the threads of a block have, joined in an order that never changes; the first of them has it.
__device__ inline double over_block(int kind, double total)
{{
    __shared__ double warps[{THREADS // 32}];
    total = over_lanes(kind, total, 32);
    if (threadIdx.x % 32 == 0)
        warps[threadIdx.x / 32] = total;
    __syncthreads();
    for (unsigned warp = 1; threadIdx.x == 0 && warp < blockDim.x / 32; ++warp)
        total = joined(kind, total, warps[warp]);
    __syncthreads();
    return total;
}}
"""

_OVER_ALL = """\
// What the threads of a block have, joined in an order that never changes; all of them have it.
__device__ inline double over_all(int kind, double total)
{
    __shared__ double all;
    total = over_block(kind, total);
    if (threadIdx.x == 0)
        all = total;
    __syncthreads();
    total = all;
    __syncthreads();
    return total;
}
"""

_LEAVE_COLUMNS = f"""\
// Leaves the totals of columns: the threads of the first line join what those below them have of the same columns.
template <int width> __device__ inline void leave_columns(
    int kind, const double (&totals)[width], unsigned lanes, double *to, int64_t count)
{{
    __shared__ double all[width][{THREADS}];
#pragma unroll
    for (int e = 0; e < width; ++e)
        all[e][threadIdx.x] = totals[e];
    __syncthreads();
    for (int e = 0; threadIdx.x < lanes && e < width && e < count; ++e) {{
        double total = all[e][threadIdx.x];
        for (unsigned below = threadIdx.x + lanes; below < blockDim.x; below += lanes)
            total = joined(kind, total, all[e][below]);
        to[e] = total;
    }}
    __syncthreads();
}}
"""

#: The kernel that finishes reductions.
FINISH_KERNEL = f"""\
// Joins what the blocks of a stage have left, always in the same order.
extern "C" __global__ void __launch_bounds__({THREADS}) finish(const Finish *results)
{{
    const Finish result = results[blockIdx.x];
    const double nothing = result.kind == SUM ? 0 : result.kind == LOWEST ? INFINITY : -INFINITY;
    const double *const source = at<const double>(result.source);
    double *const target = at<double>(result.target);
    if (result.count == 1) {{
        double total = nothing;
        for (int64_t term = threadIdx.x; term < result.terms; term += blockDim.x)
            total = joined(result.kind, total, source[term]);
        total = over_block(result.kind, total);
        if (threadIdx.x == 0)
            *target = total;
        return;
    }}
    for (int64_t i = threadIdx.x; i < result.count; i += blockDim.x) {{
        double total = nothing;
        for (int64_t term = 0; term < result.terms; ++term)
            total = joined(result.kind, total, source[term * result.stride + i]);
        target[i] = total;
    }}
}}
"""


def finish_kernel(name: str) -> str:
    """The kernel that finishes reductions, under a name of its own."""
    return FINISH_KERNEL.replace(" finish(", f" {name}(")


#: The fixed parts by the pattern of their use, each before its use.
_PARTS: Mapping[str, str] = {
    r"\bChunk\b": _struct("Chunk", CHUNK, "Elements start to stop of one tensor, and where its totals go."),
    r"\bTile\b": _struct(
        "Tile", TILE, "Lines top to bottom of a tensor, their columns left to right, and where totals go."
    ),
    r"\bFinish\b": _struct(
        "Finish",
        FINISH,
        "Neighbouring totals to be joined with those of other lines, a stride apart, and where they go.",
    ),
    r"\bat<": _ADDRESS,
    r"\b[pP]ack<": _PACK,
    r"\bloose<": _LOOSE,
    r"\bjoined\(": _JOINED,
    r"\bover_lanes\(": _OVER_LANES,
    r"\bover_block\(": _OVER_BLOCK,
    r"\bover_all\(": _OVER_ALL,
    r"\bleave_columns\(": _LEAVE_COLUMNS,
}

#: The names of a kernel's arguments and variables.
_LOCALS = (
    "place", "chunk", "chunks", "tile", "tiles", "bound", "per_call", "table", "stays", "scale", "row", "wide",
    "packed", "i", "j", "e", "line", "lanes", "lane", "top", "column", "tensors", "group", "groups", "group_count",
    "counts", "hyper", "narrow", "writes", "step", "finish", "scalars", "joined", "over_lanes", "over_block",
    "leave_columns", "pack", "loose", "at",
)  # fmt: skip

#: Names that no value of a rule may have, beside the words of C.
_RESERVED = frozenset(
    {
        *_LOCALS, "Chunk", "Tile", "Finish", "Pack", "Kind", "SUM", "LOWEST", "HIGHEST",
        "threadIdx", "blockIdx", "blockDim", "gridDim", "warpSize",
    }
)  # fmt: skip

#: CUDA C as a dialect of the C family.
DIALECT = Dialect("cupy", "__device__ inline", _WORDS, _RESERVED, table="__device__ const", branches=True)


def parts_used(text: str) -> list[str]:
    """The fixed parts that a text uses, directly or not, each before its use."""
    return used(_PARTS, text)


def types_used(text: str) -> list[str]:
    """The definitions of C's types and macros in a text."""
    return [line for name, line in _TYPES.items() if re.search(rf"\b{name}\b", text)]
