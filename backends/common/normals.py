"""The constants of Box and Muller's method in C, CUDA C and Triton. Normal numbers have the same bits in all three."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

from .fragments import polynomial

#: (log(1 + f) - f + f**2/2)/f**3 for f from sqrt(1/2) - 1 to sqrt(2) - 1, at Chebyshev's points: good to 2**-27.
_LOG = (
    0.3333333134651184, -0.2499999701976776, 0.20000715553760529, -0.1666780263185501, 0.14249058067798615,
    -0.12425687164068222, 0.11685419827699661, -0.11479733884334564, 0.06971611827611923,
)  # fmt: skip


def normal_marks(wide: bool, number: Callable[[float], str]) -> Mapping[str, str]:
    """The parts of the method's text by mark, in float64 where `wide`; `number` prints a constant.

    They are polynomials of `f` or `square`, the size of a cell of uniform numbers, and the angle of a cell.
    """
    # As many terms of the series, beside the first, as an eighth of a turn needs.
    sines, cosines = (8, 9) if wide else (4, 5)
    sine = ((-1) ** n / math.factorial(2 * n + 1) for n in range(1, sines + 1))
    cosine = ((-1) ** n / math.factorial(2 * n) for n in range(1, cosines + 1))

    def printed(name: str, terms: Iterable[float]) -> str:
        return polynomial(name, [*map(number, terms)])

    return {
        "<log>": printed("f", _LOG), "<sine>": printed("square", sine), "<cosine>": printed("square", cosine),
        "<cell>": number(2.0**-23), "<angle>": number(2 * math.pi * 2.0**-23),
    }  # fmt: skip
