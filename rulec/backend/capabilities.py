"""A gradient as a sum of noise: kernels take a Noise in place of the gradient, and the gradient is never in memory.

A backend may offer kernels for noise, for rules of one elementwise stage, by two more methods.
`emit_estimate(program, layout, values)` is the source for noise of these values; it is pure, and raises
BackendUnsupported for a rule without such a kernel. `build_estimate(program, layout, values, source)` is the kernel. It
is bound and called as any other, with Noise among its gradients.

A backend may also offer `fill_noise(out, noise, offset=0)`, which writes the gradient: element i of `out`, a contiguous
array of floating-point numbers, in its order in memory, becomes element `offset + i` of the noise. With a single weight
of 1 this is the noise of one direction. The kernel for noise gives the same bits as the program's own kernel with a
gradient of the layout's dtype written by `fill_noise`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

#: Kinds of noise: standard normal; 1 or -1; the set bits of a byte less 4, from -4 to 4.
Values = Literal["normal", "rademacher", "popcount"]

#: The bit of the key's second word that sets noise apart from a rule's own random numbers.
_DOMAIN = 2**31

_WORD = 0xFFFFFFFF


@dataclass(frozen=True, eq=False)
class Noise:
    """A gradient as noise: element e is the sum over d of `weights[d] * value(first + d, e)`.

    The sum begins at 0 and goes over directions in order, in float64 for a gradient of float64 and in float32 for
    others; it is rounded to the gradient's dtype once. `weights` is of float32 or float64, one for each direction.
    Values of popcount are whole numbers of variance 2: the caller scales their weights. Weights have few significant
    bits, so that their products with whole numbers are exact: see `rulec.es.streams.short_weights`.

    Values are made from words of Philox4x32-10 under `key`. The counter is (block, `high` + the upper half of block's
    64 bits, direction, `step`), all of 32 bits. A block of four words serves 4 elements of normal noise, 128 of
    rademacher and 16 of popcount, the lowest bits of the first word first.
    """

    values: Values
    seed: int
    layer: int
    step: int
    weights: np.ndarray[Any, np.dtype[Any]]
    first: int = 0
    purpose: int = 0

    @property
    def key(self) -> tuple[int, int]:
        """The generator's key: two words of 32 bits."""
        return self.seed & _WORD, (self.layer + _DOMAIN) & _WORD

    @property
    def high(self) -> int:
        """The addend of the upper half of a block's number: the purpose, in the upper half of a word."""
        return self.purpose << 16

    @property
    def counted(self) -> tuple[np.ndarray[Any, np.dtype[np.int64]], np.ndarray[Any, np.dtype[Any]]]:
        """The directions with a weight other than zero, and these weights: a weight of zero changes no bit."""
        (places,) = np.nonzero(self.weights)
        return places + self.first, self.weights[places]
