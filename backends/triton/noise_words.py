"""Functions of noise as Triton source: random words, the values of their bits, and sums over directions.

Normal numbers of float32 are equal to those of the c and cupy backends, bit for bit where products are not contracted.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..common.noise import ELEMENTS, normal_marks
from ..common.text import filled
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

_LESS_FOUR = '''\
@triton.jit
def less_four(byte):
    """Bytes less 4, as float32: their bits behind those of 2**23."""
    return (byte | 0x4B000000).to(tl.float32, bitcast=True) - 8388612.0
'''

_IN_ORDER = '''\
@triton.jit
def in_order(a, b, c, d):
    """Four tensors as one of two more dimensions, in which one goes through them in order."""
    return tl.join(tl.join(a, c), tl.join(b, d))
'''

_SUM = '''\
@triton.jit
def sum_of_noise(noise, start, BLOCK: tl.constexpr):
    """Elements `start` and on of a sum of noise, direction by direction in order.

    At `noise` are words: how many bytes behind them directions begin and how many there are, the key, what is added to
    the upper half of a block's number, the step, and the element that the tensor's first one is. A thread has <unit>
    neighbouring elements, each in a variable of its own, and needs no other's words.
    """
    at = noise.to(tl.pointer_type(tl.int64))
    numbers = (noise + tl.load(at)).to(tl.pointer_type(tl.<whole>))
    weights = (noise + tl.load(at)).to(tl.pointer_type(tl.<real>))
    seed, layer = tl.load(at + 2).to(tl.uint32), tl.load(at + 3).to(tl.uint32)
    step, offset = tl.load(at + 5).to(tl.uint32), tl.load(at + 6)
    unit = (offset + start) // <unit> + tl.arange(0, BLOCK // <unit>)
    block = unit<of a block>
    low, high = block.to(tl.uint32), ((block >> 32) + tl.load(at + 4)).to(tl.uint32)
<first>
    for d in range(0, tl.load(at + 1)):
        number, weight = tl.load(numbers + 2 * d).to(tl.uint32), tl.load(weights + 2 * d + 1)
        a, b, c, e = philox(low, high, number, step, seed, layer)
<add>
    return tl.reshape(<all>, (BLOCK,))
'''

#: The neighbouring elements of one thread.
UNIT: Mapping[str, int] = {"popcount": 16, "rademacher": 16, "normal": 4}


def _add(values: str) -> list[str]:
    """The statements that add the values of a unit in one direction."""
    if values == "popcount":
        return [line for i, word in enumerate("abce") for line in _bytes(i, word)]
    if values == "rademacher":
        chosen = "tl.where(unit % 8 < 4, tl.where(unit % 4 < 2, a, b), tl.where(unit % 4 < 2, c, e))"
        bits = [f"sum_{i} += tl.where((bits & {1 << i}) != 0, -weight, weight)" for i in range(16)]
        return [f"bits = {chosen} >> (unit % 2 * 16).to(tl.uint32)", *bits]
    return ["x, y = normals<64>(a, b)", "sum_0 += weight * x", "sum_1 += weight * y",
            "x, y = normals<64>(c, e)", "sum_2 += weight * x", "sum_3 += weight * y"]  # fmt: skip


def _bytes(place: int, word: str) -> list[str]:
    """The statements that add the bytes of a word."""
    shifts = [f"bits >> {8 * i}" if i else "bits" for i in range(4)]
    sums = [f"sum_{4 * place + i} += weight * less_four({x} & 255)<wide>" for i, x in enumerate(shifts)]
    return [f"bits = set_bits({word})", *sums]


def _all(count: int) -> str:
    """All sums of a unit, in order."""
    if count == 4:
        return "in_order(sum_0, sum_1, sum_2, sum_3)"
    parts = [", ".join(f"sum_{i}" for i in range(j, count, 4)) for j in range(4)]
    return f"in_order({', '.join(f'in_order({part})' for part in parts)})"


def noise_words(values: str, compute: str) -> list[str]:
    """The functions of noise of the kind `values` in float32 or float64, `sum_of_noise` the last."""
    wide = compute == "float64"
    unit = UNIT[values]
    blocks = ELEMENTS[values] // unit
    marks = {
        "<first>": "\n".join(f"    sum_{i} = tl.zeros((BLOCK // {unit},), tl.{compute})" for i in range(unit)),
        "<add>": "\n".join(f"        {line}" for line in _add(values)), "<all>": _all(unit), "<unit>": str(unit),
        "<of a block>": f" // {blocks}" if blocks > 1 else "", "<real>": compute,
        "<whole>": "uint64" if wide else "uint32",
        "<64>": "_64" * wide, "<wide>": ".to(tl.float64)" * wide,
        "<root>": "tl.sqrt" if wide else "tl.sqrt_rn", "<logarithm>": "tl.log" if wide else "log_of_normal",
        # Numbers of float32 in nine digits, as in C.
        **normal_marks(wide, lambda x: constant(x if wide else float(f"{x:.9g}"), compute)),
        "<cell>": constant(2.0**-23, compute),
    }  # fmt: skip
    functions = {"popcount": [_SET_BITS, _LESS_FOUR], "rademacher": [], "normal": [*[_LOG] * (not wide), _NORMALS]}[
        values
    ]
    return [filled(text, marks) for text in [_PHILOX, *functions, _IN_ORDER, _SUM]]
