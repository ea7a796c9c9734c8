"""Functions for printed Triton source that Triton lacks, each printed only where it is used."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from rulec.compiler.ir import Program

from ..common.constants import SINGLE
from ..common.quotients import LEAST_DIVISOR, MOST_DIVISOR, window
from ..common.text import about, filled, used
from .functions import FUNCTIONS
from .packs import PACKS

_TO_BFLOAT16 = '''\
@triton.jit
def to_bfloat16(x, EMULATED: tl.constexpr):
    """A float32 rounded to bfloat16, halves to even; by hand in the interpreter, whose own rounding loses carries."""
    if EMULATED:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        narrow = tl.where(x == x, rounded, (bits >> 16) | 0x40)
        return narrow.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(tl.bfloat16)
'''

_LOWEST = '''\
@triton.jit
def lowest(x, axis: tl.constexpr = None, keep_dims: tl.constexpr = False):
    """The minimum, NaN where there is one."""
    least = tl.min(tl.where(x == x, x, float("inf")), axis, keep_dims=keep_dims)
    return tl.where(tl.max((x != x).to(tl.int32), axis, keep_dims=keep_dims) != 0, float("nan"), least)
'''

_HIGHEST = '''\
@triton.jit
def highest(x, axis: tl.constexpr = None, keep_dims: tl.constexpr = False):
    """The maximum, NaN where there is one."""
    most = tl.max(tl.where(x == x, x, -float("inf")), axis, keep_dims=keep_dims)
    return tl.where(tl.max((x != x).to(tl.int32), axis, keep_dims=keep_dims) != 0, float("nan"), most)
'''

_FINISH = '''\
@triton.jit(do_not_specialize=["jobs", "slots", "results"])
def finish(jobs, slots, results, LANES: tl.constexpr):
    """Joins slots in a fixed order, round by round: to LANES results side by side, or to one.

    A line of `jobs` says what the reduction is (0 sum, 1 minimum, 2 maximum), whether to one result, where the first
    slot and the result are, how many rounds there are, how far apart these and the slots of a round are, and how many
    slots there are to one result, or results side by side.
    """
    job = jobs + 8 * tl.program_id(0).to(tl.int64)
    kind, one, at, to = tl.load(job), tl.load(job + 1), tl.load(job + 2), tl.load(job + 3)
    rounds, apart, step, limit = tl.load(job + 4), tl.load(job + 5), tl.load(job + 6), tl.load(job + 7)
    lane = tl.arange(0, LANES)
    nothing = tl.where(kind == 0, 0.0, tl.where(kind == 1, float("inf"), -float("inf"))).to(tl.float64)
    total = tl.full((LANES,), 0.0, tl.float64) + nothing
    for done in range(0, rounds):
        inside = done * one * LANES + lane < limit
        x = tl.where(inside, tl.load(slots + at + done * apart + lane * step, mask=inside), nothing)
        least = tl.minimum(total, x, propagate_nan=tl.PropagateNan.ALL)
        most = tl.maximum(total, x, propagate_nan=tl.PropagateNan.ALL)
        total = tl.where(kind == 0, total + x, tl.where(kind == 1, least, most))
    if one == 0:
        tl.store(results + to + lane, total, mask=lane < limit)
    elif kind == 0:
        tl.store(results + to, tl.sum(total))
    elif kind == 1:
        tl.store(results + to, lowest(total))
    else:
        tl.store(results + to, highest(total))
'''

_SIGN = '''\
@triton.jit
def sign(x):
    """1, -1 or 0 by the sign of `x`; NaN of NaN."""
    return tl.where(x > 0, 1.0, tl.where(x < 0, -1.0, x))
'''

_AWAY = '''\
@triton.jit
def away(x, count):
    """`x` moved away from zero by a count of ulps."""
    return (x.to(tl.int32, bitcast=True) + count.to(tl.int32)).to(tl.float32, bitcast=True)
'''

_ULPS = '''\
@triton.jit
def ulps(x, y):
    """The ulps from `y` away from zero to `x`, of one sign; 0 where `x` is NaN."""
    count = x.to(tl.int32, bitcast=True) - y.to(tl.int32, bitcast=True)
    return tl.where(x == x, count, 0).to(tl.float32)
'''

_COARSE = '''\
@triton.jit
def coarse(x, count):
    """`x` moved away from zero by a count of ulps, its lowest 16 bits cleared; `x` where it is not finite."""
    bits = (x.to(tl.int32, bitcast=True) + count.to(tl.int32)) & -65536
    return tl.where(tl.abs(x) < float("inf"), bits.to(tl.float32, bitcast=True), x)
'''

_SCRAMBLED = '''\
@triton.jit
def scrambled(x):
    """lowbias32, the mixing function of Chris Wellons (hash-prospector, 2018), of a uint32."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D).to(tl.uint32)
    x = ((x ^ (x >> 15)) * 0x846CA68B).to(tl.uint32)
    return x ^ (x >> 16)
'''

_CHANCE = '''\
@triton.jit
def chance(place, seed_low, seed_high, number, step, draw):
    """The random number below 2**16 of elements at places, for a seed of two halves, a tensor, a step and a draw."""
    seed = seed_low.to(tl.uint32) + (seed_high.to(tl.uint32) << 16)
    stream = scrambled(scrambled(number.to(tl.uint32) + (draw.to(tl.uint32) << 24)) ^ seed)
    first = scrambled(stream ^ step.to(tl.uint32))
    second = scrambled((stream * 0x9E3779B9).to(tl.uint32) + step.to(tl.uint32))
    high = ((place >> 32).to(tl.uint32) * 0x6A09E667).to(tl.uint32)
    counter = (place.to(tl.uint32) * 0x9E3779B9).to(tl.uint32) + (first + high)
    mixed = ((counter ^ (counter >> 16)) * 0x7FEB352D).to(tl.uint32) + second
    mixed = ((mixed ^ (mixed >> 15)) * 0x846CA68B).to(tl.uint32)
    return (mixed >> 16).to(tl.float32)
'''

_IN_RANGE = '''\
@triton.jit
def in_range(place, start_low, start_high):
    """The places in a whole tensor of elements at places of a part that is one range from a start on."""
    return place + start_low.to(tl.int64) + (start_high.to(tl.int64) << 24)
'''

_IN_ROWS = '''\
@triton.jit
def in_rows(place, start_low, start_high, width_low, width_high, gap_low, gap_high):
    """The same of a part that is rows of a width with gaps between them."""
    width = width_low.to(tl.int64) + (width_high.to(tl.int64) << 24)
    gap = gap_low.to(tl.int64) + (gap_high.to(tl.int64) << 24)
    return in_range(place, start_low, start_high) + place // width * gap
'''

_RECIPROCAL = f'''\
@triton.jit
def reciprocal(divisor):
    """1/divisor where quotients by it are products; else NaN, and they are divisions."""
    is_safe = (divisor >= {LEAST_DIVISOR[SINGLE]}) & (divisor <= {MOST_DIVISOR[SINGLE]})
    return tl.where(is_safe, tl.div_rn(1.0, divisor), float("nan"))
'''

_IS_NVIDIA = '''\
def is_nvidia(_semantic=None, _builder=None):
    """Whether the kernel is compiled for a GPU of NVIDIA. The compiler gives one of the arguments."""
    builder = _builder if _semantic is None else _semantic.builder
    return tl.constexpr(builder is not None and builder.options.backend_name == "cuda")


is_nvidia.__triton_builtin__ = True
'''

#: See `common.quotients`. Triton has no branch for a thread, so a text of PTX has one for two quotients; one for more
#: takes more registers. Neither other GPUs nor the interpreter run it.
_QUOTIENT = '''\
@triton.jit
def quotient(x, divisor, inverse):
    """x/divisor as IEEE rounds it, with the inverse of the divisor from `reciprocal`."""
    if is_nvidia():
        return tl.inline_asm_elementwise(
            """{
                .reg .pred is_inside, is_unsafe, divides;
                .reg .b32 bits_0, bits_1;
                .reg .f32 near_0, near_1, rest_0, rest_1;
                mul.rn.f32 near_0, $2, $6;
                mul.rn.f32 near_1, $3, $7;
                neg.f32 rest_0, $2;
                neg.f32 rest_1, $3;
                fma.rn.f32 rest_0, near_0, $4, rest_0;
                fma.rn.f32 rest_1, near_1, $5, rest_1;
                neg.f32 rest_0, rest_0;
                neg.f32 rest_1, rest_1;
                fma.rn.f32 $0, rest_0, $6, near_0;
                fma.rn.f32 $1, rest_1, $7, near_1;
                mov.b32 bits_0, near_0;
                mov.b32 bits_1, near_1;
                add.u32 bits_0, bits_0, <added>;
                add.u32 bits_1, bits_1, <added>;
                and.b32 bits_0, bits_0, bits_1;
                and.b32 bits_0, bits_0, <tested>;
                setp.ne.b32 is_inside, bits_0, 0;
                @is_inside bra DONE;
                setp.nan.f32 is_unsafe, $6, $7;
                setp.neu.or.f32 divides, $2, 0f00000000, is_unsafe;
                @divides div.rn.f32 $0, $2, $4;
                setp.neu.or.f32 divides, $3, 0f00000000, is_unsafe;
                @divides div.rn.f32 $1, $3, $5;
                DONE:
            }""",
            "=&f,=&f,f,f,f,f,f,f", [x, divisor, inverse], dtype=tl.float32, is_pure=True, pack=2,
        )
    else:
        return tl.div_rn(x, divisor)
'''


def _quotient() -> str:
    added, tested = window(SINGLE)
    return filled(_QUOTIENT, {"<added>": added, "<tested>": tested})


#: The text of each function by name, after the functions it calls.
WORDS: Mapping[str, str] = {
    "lowest": _LOWEST, "highest": _HIGHEST, "finish": _FINISH, "to_bfloat16": _TO_BFLOAT16, "sign": _SIGN,
    "away": _AWAY, "ulps": _ULPS, "coarse": _COARSE, "scrambled": _SCRAMBLED, "chance": _CHANCE,
    "in_range": _IN_RANGE, "in_rows": _IN_ROWS, "reciprocal": _RECIPROCAL,
    "is_nvidia": _IS_NVIDIA, "quotient": _quotient(), **PACKS, **FUNCTIONS,
}  # fmt: skip


def file_text(program: Program, title: str, parts: Sequence[str]) -> str:
    """The file of a rule: its docstring has a title and what the rule is."""
    return source_text("\n".join([title, "", *about(program), ""]), parts)


def source_text(head: str, parts: Sequence[str]) -> str:
    """A file: its docstring, its imports, and its parts."""
    head = head.replace("\\", "\\\\").replace('"""', "'''")
    imports = "import triton\nimport triton.language as tl"
    return "\n\n\n".join([f'"""{head}"""\n\n{imports}', *(part.rstrip("\n") for part in parts)]) + "\n"


def words_used(text: str) -> list[str]:
    """The sources of all functions that `text` calls, directly or not, each before its use."""
    patterns = {rf"(?<![\w.]){name}\(": source for name, source in WORDS.items()}
    return used(patterns, text, lambda source: re.sub(r'""".*?"""', "", source))
