"""Quotients by a number that divides many elements, as products, against NumPy's divisions: bit for bit.

The printed function of CUDA C is compiled for the processor. The text of PTX is run in test_triton_quotient.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rulec_backends.c.compile import missing
from rulec_backends.common.constants import DOUBLE, SINGLE, Format
from rulec_backends.common.quotients import LEAST_DIVISOR, LEAST_EXPONENT, MOST_DIVISOR, bounds, window
from tests.backends.c_functions import function

Array = np.ndarray[Any, Any]

WORDS = {SINGLE: np.uint32, DOUBLE: np.uint64}
REALS = {SINGLE: np.float32, DOUBLE: np.float64}

#: The fractions that dividends and divisors have beside each pair of exponents.
FRACTIONS = 64


@functools.cache
def quotient_of(form: Format) -> Callable[..., Array]:
    """The quotients of two arrays by the printed function."""
    if missing():
        pytest.skip(str(missing()))
    suffix = "f" if form is SINGLE else ""
    return function(f"quotient{suffix}(x0[i], x1[i], reciprocal{suffix}(x1[i]))", form.name, inputs=2)


def check(form: Format, x: Array, divisors: Array) -> None:
    """The quotients have the bits of NumPy's; a NaN is one of any bits."""
    divisors = np.broadcast_to(divisors, x.shape).copy()
    with np.errstate(all="ignore"):
        wanted = x / divisors
    found = quotient_of(form)(x, divisors)
    word = WORDS[form]
    other = (found.view(word) != wanted.view(word)) & ~(np.isnan(found) & np.isnan(wanted))
    assert not other.any(), f"{x[other][:3]} / {divisors[other][:3]}"


def made(form: Format, exponents: Array, fractions: Array) -> Array:
    """The positive numbers with these exponents, as they lie in their bits, and fractions."""
    word = WORDS[form]
    bits = exponents.astype(word) << word(form.fraction) | fractions.astype(word)
    return bits.view(REALS[form])


def fractions(form: Format, count: int, rng: np.random.Generator) -> Array:
    """Fractions at the ends of their range, with few bits, and others."""
    most = (1 << form.fraction) - 1
    chosen = [0, 1, 2, most, most - 1, most >> 1, (most >> 1) + 1, 1 << (form.fraction - 2)]
    return np.concatenate([chosen, rng.integers(0, most + 1, count - len(chosen))])


@pytest.mark.parametrize("form", [SINGLE, DOUBLE])
def test_one_addition_finds_the_bounds(form: Format) -> None:
    added, tested = window(form)
    exponents = np.repeat(np.arange(2 << (form.bits - form.fraction - 2)), 2)
    numbers = made(form, exponents, np.tile([0, (1 << form.fraction) - 1], exponents.size // 2))
    least, most = bounds(form)
    inside = (numbers >= least) & (numbers < most)
    assert inside.any()
    for signed in (numbers, -numbers):
        moved = signed.view(WORDS[form]) + WORDS[form](added)
        assert ((moved & WORDS[form](tested) != 0) == inside).all()


@pytest.mark.parametrize("form", [SINGLE, DOUBLE])
def test_rests_within_the_bounds_are_exact(form: Format) -> None:
    """The last bit of q*d counts at least as much as that of the smallest number, and 1/d is a normal number."""
    least = np.frexp(LEAST_DIVISOR[form])[1] - 1 + LEAST_EXPONENT[form]
    assert least - 2 * form.fraction >= 1 - form.bias - form.fraction
    assert 1 / MOST_DIVISOR[form] >= form.smallest_normal
    assert 1 / LEAST_DIVISOR[form] <= form.largest


def hard(form: Format, divisors: Array) -> tuple[Array, Array]:
    """The dividends whose quotients by these divisors lie nearest to the middle of two numbers, and the divisors.

    `divisors` are the whole numbers of a fraction's bits and the one before; so are the dividends A. The middle is
    M/2**s with s one or two more than a fraction has, M odd, and A*2**s - M*B is small: so M follows from 1/B.
    """
    width = form.fraction + 1
    pairs: list[tuple[Array, Array]] = []
    divisors = divisors.astype(object) if form is DOUBLE else divisors.astype(np.int64)
    for s in (width, width + 1):
        for rest in (1, 2, 3, 5, 6):
            even = 1 - rest % 2
            known = divisors[(divisors & 1 == 1 - even) & ((divisors >> even) & 1 == 1)]
            below = 1 << (s - even)
            inverse = known >> even
            for _ in range(6):
                inverse = inverse * ((2 - (known >> even) * inverse) % below) % below
            for sign in (1, -1):
                middle = (-sign * (rest >> even) * inverse) % below
                for lift in range(0, 1 << (width + 1), below):
                    dividend = ((middle + lift) * known + sign * rest) >> s
                    fits = ((middle + lift) >> width == 1) & (dividend >> (width - 1) == 1)
                    pairs.append((dividend[fits], known[fits]))
    x, d = (np.concatenate(part).astype(REALS[form]) for part in zip(*pairs, strict=True))
    return x, d


def check_hard(form: Format, divisors: Array) -> None:
    x, d = hard(form, divisors)
    assert x.size > divisors.size
    quotients = x.astype(np.longdouble) / d
    spacing = np.spacing(quotients.astype(REALS[form])).astype(np.longdouble)
    assert (np.abs(np.abs(quotients / spacing) % 1 - 0.5) < 2.0 ** (3 - form.fraction)).all()
    check(form, np.ldexp(x, -form.fraction).astype(REALS[form]), d)


@pytest.mark.parametrize("form", [SINGLE, DOUBLE])
def test_quotients_near_the_middle_of_two_numbers(form: Format) -> None:
    rng = np.random.default_rng(1)
    some = rng.integers(1 << form.fraction, 2 << form.fraction, 3000)
    last = (2 << form.fraction) - np.arange(1, 500)
    check_hard(form, np.concatenate([some, last, (1 << form.fraction) + np.arange(500)]))


@pytest.mark.slow
def test_quotients_near_the_middle_of_two_numbers_for_every_divisor() -> None:
    """All float32 quotients that the error of the product could move to another number are among them."""
    for first in range(1 << 23, 1 << 24, 1 << 19):
        check_hard(SINGLE, np.arange(first, first + (1 << 19)))


def check_fractions(divisors: Array, step: int = 1) -> None:
    """Every fraction of a float32, or every few."""
    chosen = np.arange(0, 1 << 23, step)
    x = made(SINGLE, np.full(chosen.size, 127), chosen)
    for divisor in divisors:
        check(SINGLE, x, np.float32(divisor))


def test_fractions_of_a_dividend() -> None:
    check_fractions(np.array([0.03160696]), 3)


@pytest.mark.slow
def test_every_fraction_of_a_dividend_for_many_divisors() -> None:
    rng = np.random.default_rng(2)
    ends = np.concatenate([1 + np.arange(32) * 2.0**-23, 2 - np.arange(1, 33) * 2.0**-23])
    corrections = [1 - beta**t for beta in (0.9, 0.95, 0.99, 0.999) for t in (1, 2, 3, 10, 100, 1000)]
    counts = [3, 7, 49, 768, 1000, 4097, 2**24 - 1]
    check_fractions(np.concatenate([ends, corrections, np.sqrt(corrections), counts, rng.uniform(1, 2, 1000)]))


def test_every_pair_of_exponents() -> None:
    """Zeros, subnormal numbers, infinities and NaN are among the numbers."""
    rng = np.random.default_rng(3)
    several = fractions(SINGLE, FRACTIONS, rng)
    dividends = np.repeat(np.arange(256), FRACTIONS)
    for exponent in range(256):
        x = made(SINGLE, dividends, np.tile(several, 256))
        d = made(SINGLE, np.full(x.size, exponent), np.tile(rng.permutation(several), 256))
        check(SINGLE, x, d)
        check(SINGLE, -x, d)


def test_pairs_of_exponents_near_the_bounds_in_float64() -> None:
    rng = np.random.default_rng(4)
    several = fractions(DOUBLE, FRACTIONS, rng)
    edges = [0, 1, 2046, 2047, *(1023 + e + k for e in (-512, 512, -400, 1000, -912, 0) for k in range(-3, 4))]
    for exponent in edges:
        quotients = np.array([exponent + edge - 1023 for edge in edges])
        dividends = np.unique(np.concatenate([edges, quotients]))
        dividends = np.repeat(dividends[(dividends >= 0) & (dividends < 2048)], FRACTIONS)
        x = made(DOUBLE, dividends, np.tile(several, dividends.size // FRACTIONS))
        d = made(DOUBLE, np.full(x.size, exponent), np.tile(rng.permutation(several), dividends.size // FRACTIONS))
        check(DOUBLE, x, d)
        check(DOUBLE, -x, d)


@pytest.mark.parametrize("form", [SINGLE, DOUBLE])
def test_special_numbers(form: Format) -> None:
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1, -1, 49, form.largest, form.smallest_normal])
    special = np.concatenate([special, [form.smallest_normal / 8, -form.smallest_normal * 2.0**-form.fraction]])
    x = special.astype(REALS[form])
    for divisor in x:
        check(form, x, divisor)


def test_zeros_keep_their_sign() -> None:
    zeros = np.float32([0.0, -0.0])
    assert (np.signbit(quotient_of(SINGLE)(zeros, np.full_like(zeros, 0.1))) == np.signbit(zeros)).all()
