"""Quotients by a number that divides many elements, as products: the bounds of the divisor and of the quotient.

With `r` the nearest number to 1/d, `q = x*r`, and `e = q*d - x` exact, `q - e*r` rounded once is the quotient
(Markstein 1990, Brisebarre and Muller 2004). The rest `e` is exact where `q` is a normal number, and the exponents of
`q` and `d` together are not near the smallest number's. Both hold within these bounds of `d` and of `q`. A zero keeps
its sign, as the divisor is positive.

The exponents of the quotients are half of all, so that one addition moves them to the numbers with a set upper bit.
"""

from __future__ import annotations

from .constants import DOUBLE, SINGLE, Format

#: The least and the most of a divisor whose quotients are products.
LEAST_DIVISOR = {SINGLE: 2.0**-22, DOUBLE: 2.0**-400}
MOST_DIVISOR = {SINGLE: 2.0**125, DOUBLE: 2.0**1000}

#: The exponent of the least quotient that is a product; those of half of all exponents are.
LEAST_EXPONENT = {SINGLE: -80, DOUBLE: -512}


def window(form: Format) -> tuple[int, int]:
    """Two whole numbers: the bits of a number within the bounds of quotients plus the first have the second set."""
    upper = form.bits - 2
    field = form.bias + LEAST_EXPONENT[form]
    return (1 << upper) - (field << form.fraction), 1 << upper


def bounds(form: Format) -> tuple[float, float]:
    """The sizes of quotients that are products: from the first number on, below the second."""
    least = LEAST_EXPONENT[form]
    return 2.0**least, 2.0 ** (least + form.bias + 1)
