"""Codes one in each byte, with a scale for each element: what can be cut anywhere, and joined again."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rulec.formats.blocks import Codes, packed, unpacked
from rulec.formats.format import Format
from rulec.formats.tables import Floats, table


def spread(format: Format, codes: Codes, scales: Floats, count: int) -> tuple[Codes, Floats]:
    """The code and the scale of each of `count` elements, of codes and scales that `encode` gave."""
    bits = unpacked(format, codes, count)
    return bits.view(format.code_dtype), np.repeat(np.reshape(scales, -1), format.block)[:count]


def gathered(format: Format, codes: Codes, scales: Floats) -> tuple[Codes, Floats] | None:
    """Codes in `codes_shape` of one dimension, and a scale for each block; None where a block has several scales."""
    firsts = scales[:: format.block]
    same: NDArray[np.bool_] = np.repeat(firsts.view(np.int32), format.block)[: scales.size] == scales.view(np.int32)
    return (packed(format, codes.view(np.uint8), codes.shape), firsts) if same.all() else None


def decode_spread(format: Format, codes: Codes, scales: Floats) -> Floats:
    """The float32 value of each element, as `decode` has it."""
    values: Floats = table(format)[codes.view(np.uint8)] * (scales * (np.float32(1) / np.float32(format.largest)))
    return values
