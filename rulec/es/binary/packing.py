"""Bits in words of 64: the first in the lowest bit of the first word, and zeros behind the last."""

from __future__ import annotations

from typing import Any

import numpy as np

from rulec.backend.binary import WORD_BITS, words_of

Array = np.ndarray[Any, Any]


def pack(bits: Any) -> Array:
    """Packs booleans (..., n) into uint64 words (..., `words_of(n)`); NumPy's or CuPy's."""
    count = bits.shape[-1]
    missing = -count % WORD_BITS
    if missing:
        bits = np.concatenate([bits, np.zeros_like(bits, shape=(*bits.shape[:-1], missing))], axis=-1)
    octets = np.packbits(bits.reshape(-1), bitorder="little")
    words: Array = octets.view("<u8").reshape(*bits.shape[:-1], words_of(count))
    return words


def unpack(words: Any, count: int) -> Array:
    """The first `count` bits of each line of words (..., words), as booleans (..., count)."""
    octets = words.astype("<u8").reshape(-1).view(np.uint8)
    bits = np.unpackbits(octets, bitorder="little").reshape(*words.shape[:-1], words.shape[-1] * WORD_BITS)
    chosen: Array = bits[..., :count].astype(np.bool_)
    return chosen


def contiguous(array: Any) -> Any:
    """The array, NumPy's or CuPy's, or a copy that is contiguous."""
    return array if array.flags.c_contiguous else array.copy()


def is_padded(words: Array, count: int) -> bool:
    """Whether all bits behind the first `count` of each line are zero."""
    used = count % WORD_BITS
    return not used or not bool((words[..., -1] >> np.uint64(used)).any())
