"""Pooling of packed bits: the largest of bits is their union."""

from __future__ import annotations

import itertools
from typing import Any

from rulec.errors import TensorError
from rulec.es.binary.product import Pair, pair


def max_pool(words: Any, kernel: Pair, *, stride: Pair | None = None) -> Any:
    """The union of bits in windows of height and width `kernel`, every `stride` (the kernel's own size by default).

    `words` (..., height, width, words), of any library and integer dtype, give (..., height, width, words) of as many
    windows as fit whole. TensorError where none does.
    """
    size = pair("kernel", kernel, 1)
    steps = size if stride is None else pair("stride", stride, 1)
    height, width = words.shape[-3], words.shape[-2]
    rows, columns = (height - size[0]) // steps[0] + 1, (width - size[1]) // steps[1] + 1
    if height < size[0] or width < size[1]:
        raise TensorError(f"a window of {size} is larger than inputs of {(height, width)}")
    union = None
    for y, x in itertools.product(range(size[0]), range(size[1])):
        lines = slice(y, y + (rows - 1) * steps[0] + 1, steps[0])
        shifted = words[..., lines, slice(x, x + (columns - 1) * steps[1] + 1, steps[1]), :]
        union = shifted if union is None else union | shifted
    return union
