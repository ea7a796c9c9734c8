"""Hyper-parameters that only whole numbers are allowed for: written, read, composed, and refused otherwise."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import rulec
from rulec.array import Optimizer
from rulec.errors import HyperError
from rulec.language.yaml.write import rule_to_yaml

EVERY = "name: Every\nhyper: {lr: 0.1, k: {default: 2, whole: true, min: 1}}\nstep: |\n  p = p - lr*g*(t % k)\n"


@rulec.rule(hyper={"k": {"whole": True, "min": 1}}, assigns="p")
def every(g: Any, p: Any, t: Any, *, lr: float = 0.1, k: float = 2) -> Any:
    """As `EVERY` says it."""
    return p - lr * g * (t % k)


@pytest.mark.parametrize("rule", [rulec.parse(EVERY), every], ids=["yaml", "python"])
@pytest.mark.parametrize("value", [2.5, 1.0000001, 0, math.inf, math.nan])
def test_what_is_no_whole_number_of_the_range_is_refused(rule: rulec.Rule, value: float) -> None:
    with pytest.raises(HyperError, match=rf"k={value!r} of \w+ must be a whole number, at least 1"):
        Optimizer(rule, [np.ones(2)], k=value)
    Optimizer(rule, [np.ones(2)], k=3.0).step([np.ones(2)])


def test_it_is_written_and_read_again() -> None:
    again = rulec.parse(rule_to_yaml(rulec.parse(EVERY)))
    assert again.hyper["k"].whole
    assert not again.hyper["lr"].whole


def test_a_composition_keeps_it_and_what_is_static() -> None:
    text = "name: Slow\nchain: [lookahead(galore)]\nhyper: {k: {default: 7}, rank: {default: 2, max: 9}}\n"
    rule = rulec.parse(text)
    assert rule.hyper["k"].whole
    assert (rule.hyper["rank"].whole, rule.hyper["rank"].static) == (True, True)
    with pytest.raises(HyperError, match=r"rank=2\.5 of Slow must be a whole number, at most 9"):
        Optimizer(rule, [np.ones((4, 4))], rank=2.5)


@pytest.mark.parametrize(
    ("rule", "name"),
    [
        ("accumulate(sgd)", "every"),
        ("lookahead(sgd)", "k"),
        ("galore", "rank"),
        ("muon", "ns_steps"),
        ("soap", "every"),
    ],
)
def test_rules_of_the_library_count_in_whole_numbers(rule: str, name: str) -> None:
    with pytest.raises(HyperError, match=f"{name}=2.5 of .* must be a whole number, at least 1"):
        Optimizer(rule, [np.ones((4, 4))], **{name: 2.5})
