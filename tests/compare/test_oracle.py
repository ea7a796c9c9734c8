"""How exact a side is, on rules whose exactness is known."""

from __future__ import annotations

import numpy as np
import pytest

import rulec
from rulec.errors import RuleError
from rulec.tools.compare.difference import Trial
from rulec.tools.compare.oracle import exactness, largest_ulps, ulp


def test_a_copy_is_exact_and_one_product_is_within_half_an_ulp() -> None:
    rule = rulec.parse(
        "name: Keep\nhyper: {lr: 1}\nstate: {a: 0, b: 0}\nstep: |\n  a = g\n  b = g*p\n  p = p + 0*(a + b)\n"
    )
    found = exactness(rule, {"lr": 1.0}, Trial("float32", 3), "cpu")
    assert (found.side, found.dtype) == ("cpu", "float32")
    assert found.ulps["a"] == found.ulps["p"] == 0
    assert 0 <= found.ulps["b"] <= 0.5


def test_an_inexact_side_is_seen() -> None:
    """1 - (1 - x) loses what x had below an ulp of one; the reference in float64 loses it, the oracle does not."""
    rule = rulec.parse("name: Lossy\nhyper: {lr: 1}\nstate: {a: 0}\nstep: |\n  a = 1 - (1 - g*1e-8)\n  direction = a\n")
    assert exactness(rule, {"lr": 1.0}, Trial("float64", 2)).ulps["a"] > 1e4


def test_infinity_on_one_side_alone_is_infinitely_far() -> None:
    rule = rulec.parse("name: Far\nhyper: {lr: 1}\nstate: {a: 0}\nstep: |\n  a = g*1e30*1e30\n  direction = 0*a + g\n")
    assert exactness(rule, {"lr": 1.0}, Trial("float32", 1), "numpy").ulps["a"] == np.inf


def test_what_has_no_50_digit_form_says_so() -> None:
    rule = rulec.parse("name: Turn\nstep: |\n  direction = singular_vectors(sign(g)*0 + 1, cols)\n")
    with pytest.raises(RuleError, match="singular_vectors of a matrix of 3 rows has no 50-digit form here: two of its"):
        exactness(rule, {"lr": 1e-3}, Trial("float64", 1, ((3, 3),)))


def test_ulps() -> None:
    assert ulp(np.array([1.0, 1.5, 2.0, 0.0]), "float32").tolist() == [2.0**-23, 2.0**-23, 2.0**-22, 2.0**-149]
    assert largest_ulps(np.array([1.0 + 2.0**-22]), np.array([1.0]), "float32") == 2
    assert largest_ulps(np.array([np.nan]), np.array([np.nan]), "float32") == 0
    assert largest_ulps(np.array([np.nan]), np.array([1.0]), "float32") == np.inf
    assert largest_ulps(np.zeros(0), np.zeros(0), "float32") == 0
