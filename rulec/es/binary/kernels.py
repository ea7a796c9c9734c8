"""Kernels of binary layers: the choice of a backend for them, the reference in NumPy, and packed bits.

The kernels of every backend must give the same results as those in NumPy. Bits are packed in words of 64: the first bit
is the lowest of the first word, and zeros follow the last.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np

from rulec.backend import registry
from rulec.backend.capabilities import WORD_BITS, BinaryKernels, Bits, Window, capabilities_of, words_of
from rulec.errors import BackendUnavailable
from rulec.es.streams import BITS, Stream


def kernels_of(array: Any, backend: str | None = None) -> BinaryKernels:
    """The kernels for such an array: of the backend named, else CUDA's for CuPy's arrays, machine code for NumPy's.

    If Numba is not installed, and for backend "numpy", those of NumPy. BackendUnavailable for a backend without.
    """
    if backend is None:
        backend = "cpu" if isinstance(array, np.ndarray) else "cupy"
        if backend == "cpu" and registry.get("cpu").unavailable_reason() is not None:
            backend = "numpy"
    return _kernels(backend)


@functools.cache
def _kernels(name: str) -> BinaryKernels:
    if name == "numpy":
        return ReferenceKernels()
    binary = capabilities_of(registry.usable(name)).binary
    if binary is None:
        raise BackendUnavailable(f"backend {name!r} has no kernels for packed bits: use 'numpy', 'cpu', 'c' or 'cupy'")
    return binary()


Array = np.ndarray[Any, Any]


class ReferenceKernels:
    """See `rulec.backend.capabilities.BinaryKernels`."""

    def convolve(self, inputs: Array, weights: Array, window: Window) -> Array:
        """2*(equal bits) - (all bits), int32 of shape `window.shape`."""
        totals = np.zeros(window.shape, np.int32)
        rows, columns = window.inside(0), window.inside(1)
        for y, x in product(*map(range, window.kernel)):
            there: Any = (slice(None), slice(None), *np.ix_(rows[:, y], columns[:, x]))
            at = np.ix_(window.first(0)[rows[:, y]] + y, window.first(1)[columns[:, x]] + x)
            places: Any = (slice(None), slice(None), *at)
            totals[there] += _agreement(inputs[places], weights[:, :, y, x], window.bits)
        return totals

    def draw(self, thresholds: Array, shape: Sequence[int], bits: Bits) -> Array:
        """Words (members, *shape[:-1], words): 1 where an element's word is below its threshold."""
        flat = thresholds.reshape(-1)
        stream = Stream(bits.seed, bits.layer, bits.step, purpose=BITS)
        drawn = [stream.of(direction).words(flat.size) for direction in range(bits.directions)]
        members = [word ^ np.uint32(0xFFFFFFFF * sign) for sign in range(bits.signs) for word in drawn]
        return pack(np.stack([word < flat for word in members]).reshape(bits.members, *shape))

    def weighted_sum(self, words: Array, weights: Array, count: int) -> Array:
        """The sum over members of weight times bit, float64 (..., count)."""
        total = np.zeros((*words.shape[1:-1], count))
        for member, weight in zip(words, weights, strict=True):
            total += np.where(unpack(member, count), weight, 0.0)
        return total


def _agreement(inputs: Array, weights: Array, bits: int) -> Array:
    """2*(equal bits) - (all bits) of inputs (members, samples, y, x, words) with weights (members, outputs, words)."""
    differing = np.zeros((*inputs.shape[:-1], weights.shape[1]), np.int32)
    for word in range(inputs.shape[-1]):
        kernel = weights[:, None, None, None, :, word]
        differing += np.bitwise_count(inputs[..., word, None] ^ kernel)
    return np.asarray(bits - 2 * differing, np.int32)


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
