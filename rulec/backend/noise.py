"""A gradient that is a sum of noise and need not be made: what a backend may be given in the place of a gradient.

A backend may offer kernels for such gradients, of rules that are one elementwise stage, by two more methods:
`emit_estimate(program, layout, values)`, the source for noise of those values, pure, and BackendUnsupported where it
has none; and `build_estimate(program, layout, values, source)`, whose kernel is bound and called as any other, but with
Noise among its gradients.

It may also offer `fill_noise(out, noise, offset=0)`, which writes such a gradient: element i of `out`, a contiguous
array of floating-point numbers, in its order in memory, becomes element `offset + i` of the noise. With the one weight
1 that is the noise of one direction. A kernel of an estimate gives the bits that the program's own kernel gives with a
gradient of the layout's dtype that was written so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

#: What the numbers of noise are: standard normal; 1 or -1; the set bits of a byte less 4, from -4 to 4.
Values = Literal["normal", "rademacher", "popcount"]

#: The bit of the key's second word that tells these streams from a rule's own random numbers.
_DOMAIN = 2**31

_WORD = 0xFFFFFFFF


@dataclass(frozen=True, eq=False)
class Noise:
    """The gradient whose element e is the sum over d of `weights[d] * value(first + d, e)`.

    The sum begins at 0 and goes over directions in order, in float64 where the gradient is of float64 and else in
    float32; it is rounded to the gradient's dtype once. `weights` is of float32 or float64, one for each direction.
    Values of popcount are whole numbers of variance 2: their weights have been scaled. So that a weight's product with
    a whole number is exact, weights have few significant bits: see `rulec.es.streams.short_weights`.

    The words that values are made of come from Philox4x32-10 under `key`. Their counter is (block, `high` + the upper
    half of block's 64 bits, direction, `step`), all of 32 bits; a block of four words serves 4 elements of normal
    noise, 128 of rademacher and 16 of popcount, the lowest bits of the first word first.
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
        """What is added to the upper half of a block's number: the purpose, in the upper half of a word."""
        return self.purpose << 16

    @property
    def counted(self) -> tuple[np.ndarray[Any, np.dtype[np.int64]], np.ndarray[Any, np.dtype[Any]]]:
        """The directions whose weight is not zero, and their weights: the others add nothing, not even to the bits."""
        (places,) = np.nonzero(self.weights)
        return places + self.first, self.weights[places]
