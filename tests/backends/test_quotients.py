"""Quotients by a number that divides many elements, as products, against NumPy's divisions: bit for bit."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rulec
from rulec.backend import registry
from rulec.compiler.layout import kernel_for
from rulec_backends.common.constants import DOUBLE, SINGLE, Format
from rulec_backends.common.quotients import LEAST_DIVISOR, LEAST_EXPONENT, MOST_DIVISOR, bounds, window
from rulec_backends.cpu import machine, quotients
from rulec_backends.cpu.quotients import is_fused
from tests.backends.cpu_functions import function

Array = np.ndarray[Any, Any]

WORDS = {SINGLE: np.uint32, DOUBLE: np.uint64}
REALS = {SINGLE: np.float32, DOUBLE: np.float64}

#: The numbers of a vector, at most: where all lie within the bounds, none is divided.
LANES = 64


@pytest.fixture(autouse=True)
def _as_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Quotients are products also where the processor divides as quickly."""
    monkeypatch.setattr(quotients, "is_quicker", is_fused)


@functools.cache
def quotient_of(form: Format) -> Callable[..., Array]:
    """The kernel of quotients of two arrays."""
    return function("quotient(x0, x1, reciprocal(x1))", ("quotient", "reciprocal"), form.name, inputs=2)


def check(form: Format, x: Array, divisors: Array) -> None:
    """The kernel's quotients have the bits of NumPy's; a NaN is one of any bits."""
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
    """Zeros, subnormal numbers, infinities and NaN are among the numbers; a vector has one pair of exponents."""
    rng = np.random.default_rng(3)
    several = fractions(SINGLE, LANES, rng)
    dividends = np.repeat(np.arange(256), LANES)
    for exponent in range(256):
        x = made(SINGLE, dividends, np.tile(several, 256))
        d = made(SINGLE, np.full(x.size, exponent), np.tile(rng.permutation(several), 256))
        check(SINGLE, x, d)
        check(SINGLE, -x, d)


def test_pairs_of_exponents_near_the_bounds_in_float64() -> None:
    rng = np.random.default_rng(4)
    several = fractions(DOUBLE, LANES, rng)
    edges = [0, 1, 2046, 2047, *(1023 + e + k for e in (-512, 512, -400, 1000, -912, 0) for k in range(-3, 4))]
    for exponent in edges:
        quotients = np.array([exponent + edge - 1023 for edge in edges])
        dividends = np.unique(np.concatenate([edges, quotients]))
        dividends = np.repeat(dividends[(dividends >= 0) & (dividends < 2048)], LANES)
        x = made(DOUBLE, dividends, np.tile(several, dividends.size // LANES))
        d = made(DOUBLE, np.full(x.size, exponent), np.tile(rng.permutation(several), dividends.size // LANES))
        check(DOUBLE, x, d)
        check(DOUBLE, -x, d)


@pytest.mark.parametrize("form", [SINGLE, DOUBLE])
def test_special_numbers_among_ordinary_ones(form: Format) -> None:
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1, -1, 49, form.largest, form.smallest_normal])
    special = np.concatenate([special, [form.smallest_normal / 8, -form.smallest_normal * 2.0**-form.fraction]])
    x = np.tile(special, 4 * LANES).astype(REALS[form])
    for divisor in special:
        check(form, x, REALS[form](divisor))
        check(form, np.sort(x), REALS[form](divisor))


def test_zeros_keep_their_sign() -> None:
    zeros = np.tile(np.float32([0.0, -0.0]), LANES)
    assert (np.signbit(quotient_of(SINGLE)(zeros, np.full_like(zeros, 0.1))) == np.signbit(zeros)).all()


def loops_of(rule: str) -> list[list[str]]:
    """The instructions of the kernel of a rule between a label and a jump back to it, without rare branches."""
    program = rulec.compile(rulec.parse(rule))
    source = registry.get("cpu").emit(*kernel_for(program, "float32"))
    lines = machine.emit_assembly(machine.compile_text(source, Path("kernel.py"))).splitlines()
    labels = {line[:-1]: at for at, line in enumerate(lines) if line.endswith(":")}
    jumps = [(at, re.match(r"\s+j\w+\s+(\.\w+)$", line)) for at, line in enumerate(lines)]
    return [lines[labels[m[1]] : at] for at, m in jumps if m and labels.get(m[1], at) < at]


def test_processors_that_divide_quickly_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quotients, "is_quicker", lambda: False)
    loops = loops_of("name: R\nhyper: {lr: 3, count: 7}\nstep: |\n  p = sqrt(g)/count/(lr + p)\n")
    assert any(sum("div" in line for line in loop) == 2 * sum("sqrtps" in line for line in loop) > 0 for loop in loops)


def test_kernels_divide_by_numbers_of_the_table_in_rare_branches_alone() -> None:
    if not is_fused():
        pytest.skip("no fused multiply-adds on this processor")
    rule = "name: R\nhyper: {lr: 3, count: 7}\nstep: |\n  p = sqrt(g)/count/(lr + p)\n"
    wide = [loop for loop in loops_of(rule) if any("sqrtps" in line for line in loop)]
    fused = [sum(bool(re.search(r"vfn?m(?:add|sub)\d+ps", line)) for line in loop) for loop in wide]
    divided = [sum("div" in line for line in loop) for loop in wide]
    assert any(count > 0 and 2 * divisions == count for count, divisions in zip(fused, divided, strict=True))
