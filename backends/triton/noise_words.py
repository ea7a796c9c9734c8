"""Functions of noise as Triton source: random words, what their bits stand for, and sums over directions.

Normal numbers of float32 are those of the c and cupy backends, bit for bit where products are not contracted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ..c.noise_words import SERIES, cosine_terms, log_terms, sine_terms
from ..noise import ELEMENTS
from .ops import constant

_PHILOX = '''\
@triton.jit
def philox(a, b, c, d, seed, layer):
    """The four words of blocks: Philox4x32-10 of counters and a key of unsigned words."""
    for _ in tl.static_range(10):
        one, other = tl.umulhi(a, 0xD2511F53), tl.umulhi(c, 0xCD9E8D57)
        b, d = other ^ b ^ seed, one ^ d ^ layer
        a, b, c, d = b, (c * 0xCD9E8D57).to(tl.uint32), d, (a * 0xD2511F53).to(tl.uint32)
        seed, layer = (seed + 0x9E3779B9).to(tl.uint32), (layer + 0xBB67AE85).to(tl.uint32)
    return a, b, c, d
'''

_SET_BITS = '''\
@triton.jit
def set_bits(word):
    """How many bits are set in each byte of a word, in the same byte."""
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    return (word + (word >> 4)) & 0x0F0F0F0F
'''

_LOG = '''\
@triton.jit
def log_of_normal(x):
    """The natural logarithm of a positive float32 that is not subnormal."""
    bits = x.to(tl.uint32, bitcast=True) + 0x004AFB0D
    k = ((bits >> 23).to(tl.int32) - 127).to(tl.float32)
    f = ((bits & 0x007FFFFF) + 0x3F3504F3).to(tl.float32, bitcast=True) - 1.0
    square = f * f
    rest = square * f * <log>
    return k * 0.693145751953125 + (f - (square * 0.5 - (rest + k * 1.4286067653302502e-06)))
'''

_NORMALS = '''\
@triton.jit
def normals<64>(first, second):
    """Two standard normal numbers from two words, by Box and Muller's method: the angle is brought to an eighth of a
    turn around a whole quarter exactly, while it is a whole number."""
    uniform = ((first >> 9).to(tl.<real>) + 0.5) * <cell>
    radius = <root>(-2.0 * <logarithm>(uniform))
    turn = (second >> 9).to(tl.int32)
    quarter = (turn + 1048576) >> 21
    angle = ((turn - quarter * 2097152).to(tl.<real>) + 0.5) * <angle>
    square = angle * angle
    sine = angle + angle * (square * <sine>)
    cosine = 1.0 + square * <cosine>
    odd = (quarter & 1) != 0
    along, across = tl.where(odd, sine, cosine), tl.where(odd, cosine, sine)
    along = tl.where(((quarter + 1) & 2) != 0, -along, along)
    return radius * along, radius * tl.where((quarter & 2) != 0, -across, across)
'''

_SUM = '''\
@triton.jit
def sum_of_noise(noise, start, BLOCK: tl.constexpr):
    """Elements `start` and on of a sum of noise, direction by direction in order.

    At `noise` are words: how many bytes behind them directions begin and how many there are, the key, what is added to
    the upper half of a block's number, the step, and the element that the tensor's first one is.
    """
    at = noise.to(tl.pointer_type(tl.int64))
    numbers = (noise + tl.load(at)).to(tl.pointer_type(tl.<whole>))
    weights = (noise + tl.load(at)).to(tl.pointer_type(tl.<real>))
    seed, layer = tl.load(at + 2).to(tl.uint32), tl.load(at + 3).to(tl.uint32)
    step, offset = tl.load(at + 5).to(tl.uint32), tl.load(at + 6)
    block = (offset + start) // <each> + tl.arange(0, BLOCK // <each>)
    low, high = block.to(tl.uint32), ((block >> 32) + tl.load(at + 4)).to(tl.uint32)
    <first>
    for d in range(0, tl.load(at + 1)):
        number, weight = tl.load(numbers + 2 * d).to(tl.uint32), tl.load(weights + 2 * d + 1)
        a, b, c, e = philox(low, high, number, step, seed, layer)
<add>
    return tl.reshape(sums, (BLOCK,))
'''

#: What sums begin with, and how the values of a block's words are added, by kind.
_ADD: Mapping[str, tuple[str, str]] = {
    "popcount": (
        "sums = tl.zeros((BLOCK // 16, 4, 4), tl.<real>)\n    place = 8 * tl.arange(0, 4)[None, None, :].to(tl.uint32)",
        "bits = set_bits(tl.reshape(tl.join(tl.join(a, c), tl.join(b, e)), (BLOCK // 16, 4, 1)))\n"
        "count = (((bits >> place) & 255) | 0x4B000000).to(tl.float32, bitcast=True) - 8388612.0\n"
        "sums += weight * count<wide>",
    ),
    "rademacher": (
        "sums = tl.zeros((BLOCK // 32, 32), tl.<real>)\n    place = tl.arange(0, 32)[None, :].to(tl.uint32)",
        "words = tl.reshape(tl.join(tl.join(a, c), tl.join(b, e)), (BLOCK // 32, 1))\n"
        "sums += tl.where(((words >> place) & 1) != 0, -weight, weight)",
    ),
    "normal": (
        "sums = tl.zeros((BLOCK // 4, 2, 2), tl.<real>)",
        "x, y = normals<64>(a, b)\nz, w = normals<64>(c, e)\nsums += weight * tl.join(tl.join(x, z), tl.join(y, w))",
    ),
}

WORDS_KERNEL = '''\
@triton.jit(do_not_specialize=["seed", "layer", "high", "direction", "step", "offset"])
def words(out, count, seed, layer, high, direction, step, offset, BLOCK: tl.constexpr):
    """Words of elements `offset` and on, `count` in each line, each line of the next direction: 4*BLOCK of one line."""
    line = tl.program_id(1)
    block = offset // 4 + tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    low, above = block.to(tl.uint32), ((block >> 32) + high).to(tl.uint32)
    number = (direction + line).to(tl.uint32)
    a, b, c, d = philox(low, above, number, step.to(tl.uint32), seed.to(tl.uint32), layer.to(tl.uint32))
    made = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (4 * BLOCK,)).to(tl.int32, bitcast=True)
    e = (offset // 4 + tl.program_id(0).to(tl.int64) * BLOCK) * 4 - offset + tl.arange(0, 4 * BLOCK)
    tl.store(out + line.to(tl.int64) * count + e, made, mask=(e >= 0) & (e < count))
'''


def _polynomial(name: str, terms: Sequence[float], compute: str) -> str:
    """A polynomial by Horner's scheme."""
    text = constant(_rounded(terms[-1], compute), compute)
    for term in reversed(terms[:-1]):
        text = f"({constant(_rounded(term, compute), compute)} + {name} * {text})"
    return text


def _rounded(value: float, compute: str) -> float:
    """The number as C reads it in nine digits, where it is a float."""
    return float(f"{value:.9g}") if compute == "float32" else value


def noise_words(values: str, compute: str) -> list[str]:
    """The functions that sum noise of such values in float32 or float64, `sum_of_noise` the last of them."""
    wide = compute == "float64"
    sines, cosines = SERIES["double" if wide else "float"]
    first, add = _ADD[values]
    marks = {
        "<first>": first, "<add>": "\n".join(f"        {line}" for line in add.splitlines()),
        "<each>": str(ELEMENTS[values]), "<real>": compute, "<whole>": "uint64" if wide else "uint32",
        "<64>": "_64" * wide, "<wide>": ".to(tl.float64)" * wide,
        "<root>": "tl.sqrt" if wide else "tl.sqrt_rn", "<logarithm>": "tl.log" if wide else "log_of_normal",
        "<cell>": constant(2.0**-23, compute), "<log>": _polynomial("f", log_terms(), "float32"),
        "<angle>": constant(_rounded(2 * math.pi * 2.0**-23, compute), compute),
        "<sine>": _polynomial("square", sine_terms(sines), compute),
        "<cosine>": _polynomial("square", cosine_terms(cosines), compute),
    }  # fmt: skip
    own = {"popcount": [_SET_BITS], "rademacher": [], "normal": [*[_LOG] * (not wide), _NORMALS]}[values]
    return [_marked(text, marks) for text in [_PHILOX, *own, _SUM]]


def _marked(text: str, marks: Mapping[str, str]) -> str:
    for mark, part in marks.items():
        text = text.replace(mark, part)
    return text


def words_source() -> str:
    """The file of the kernel `words`."""
    return "\n\n\n".join(["import triton\nimport triton.language as tl", _PHILOX.rstrip("\n"), WORDS_KERNEL])
