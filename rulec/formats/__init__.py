"""Formats of small states: blocks of codes of eight or four bits, with a float32 scale for each block.

These functions of NumPy define every format; kernels equal them bit for bit. The arithmetic is float32 without fused
multiply-adds. For the elements x of a block, in C order:

    positive, negative = max(0, x...), max(0, -x...)
    scale = negative/reach if negative >= positive else positive
    scale = min(max(scale, smallest_scale), 3.4028235e38)
    y     = x*(largest/scale)                       one division for a block
    code  = nearest(y)                              by format, below
    x     = table[code]*(scale*(1/largest))         one product with the float32 1/largest for a block

| name | codes | nearest(y) | table[code] | largest | reach | distance from x, at most |
|---|---|---|---|---|---|---|
| int8 | int8 | rint(y) | code | 127 | 1 | scale/254 |
| int8, unsigned | uint8 | rint(sqrt(y)*255) | t*t, t = code*(1/255) | 1 | 1 | scale/255 |
| softsign8 | int8 | rint((y + y)/(1 + abs(y))*127) | t/(2 - abs(t)), t = code*(1/127) | 1 | 1 | scale/127 |
| softsign8, unsigned | as int8, unsigned | | | | | |
| dynamic8 | uint8 | thresholds below y | map of bitsandbytes and torchao | 1 | 0.99296874 | 0.0071*scale |
| dynamic8, unsigned | uint8 | thresholds below y | map of bitsandbytes and torchao | 1 | 1 | 0.0036*scale |
| dynamic4 | 4 bits | thresholds below y | map of torchao | 1 | 0.8875 | 0.1126*scale |
| dynamic4, unsigned | 4 bits | thresholds below y | 1/16, 2/16 ... 1: no zero | 1 | 1 | scale/16 |
| float8_e4m3 | bits | to nearest, ties to even | the value of the bits | 448 | 1 | x/16 or scale/458752 |
| float8_e5m2 | bits | to nearest, ties to even | the value of the bits | 57344 | 1 | x/8 or scale/7.5e9 |

`rint` rounds halves to even. A threshold is the float32 midpoint of neighbours in the table; `y` on a threshold gets
the lower entry. A block with a value that is not finite has scale NaN and codes of all bits zero, and decodes to NaN.
Unsigned formats take negative values, and -0.0, as 0. `smallest_scale` is the power of two at or above `largest`, times
2**-126, so that `largest/scale` is finite and `scale*(1/largest)` normal. With the floor, x > 0 with the code of zero
gets the code after it, the smallest positive one, and is at most that far from it.

To encode decoded values gives the same codes, and the same scales where `largest` is 1. Other scales, and those of
values below 2**-126, may move by some units in the last place: eight at most, however often.
"""

from rulec.formats.blocks import decode, decode_spread, encode, gathered, spread
from rulec.formats.format import NAMES, UNBIASED, Format, of_key, parse
from rulec.formats.lookup import Lines, Steps, lines, steps
from rulec.formats.tables import reach, table, thresholds, zero

__all__ = [
    "NAMES", "UNBIASED", "Format", "Lines", "Steps", "decode", "decode_spread", "encode", "gathered", "lines", "of_key",
    "parse", "reach", "spread", "steps", "table", "thresholds", "zero",
]  # fmt: skip
