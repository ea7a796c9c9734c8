"""Where two sides part, on sides whose values are known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import rulec
from rulec.errors import RulecError
from rulec.tools.compare.difference import Trial, compare, order_of_values
from rulec.tools.compare.sides import Array

TRIAL = Trial("float64", 4, ((3,),))


class Scripted:
    """A side whose values in each step are given."""

    name = "scripted"

    def __init__(self, *steps: dict[str, Any]) -> None:
        self.steps = [{k: np.asarray(v, np.float64) for k, v in step.items()} for step in steps]
        self.at = -1

    def step(self, grads: Sequence[Array]) -> None:
        self.at += 1

    def values(self) -> list[dict[str, Array]]:
        return [self.steps[min(self.at, len(self.steps) - 1)]]


def differences(ours: Scripted, theirs: Scripted, order: Sequence[str] = ("m", "p"), **names: str) -> Any:
    return compare(ours, theirs, TRIAL, order, 1e-9, names)


def test_the_first_step_value_and_element_are_found() -> None:
    same, other = {"p": [1.0, 2.0, 4.0]}, {"p": [1.0, 2.5, 4.0]}
    found = differences(Scripted(same, same, other), Scripted(same))
    assert (found.first.step, found.first.value, found.first.element) == (3, "p", (1,))
    assert (found.first.ours, found.first.theirs) == (2.5, 2.0)
    assert found.largest == {"p": 0.125}


def test_a_state_is_looked_at_before_the_parameter() -> None:
    ours = Scripted({"p": [1.0, 1.0, 1.0], "m": [2.0, 2.0, 2.0]})
    theirs = Scripted({"p": [2.0, 1.0, 1.0], "avg": [2.0, 2.0, 4.0]})
    assert differences(ours, theirs, m="avg").first.value == "m"


def test_states_without_a_name_are_matched_by_what_they_hold() -> None:
    ours = Scripted(*({"p": [0, 0, 0], "m": m} for m in ([0, 0, 0], [1, 2, 3], [1, 2, 9])))
    theirs = Scripted(
        {"p": [0, 0, 0], "other": [0, 0, 0], "avg": [0, 0, 0]},
        {"p": [0, 0, 0], "other": [7, 7, 7], "avg": [1, 2, 3]},
    )
    found = differences(ours, theirs)
    assert (found.first.step, found.first.value) == (3, "m")
    assert found.first.theirs == 3.0


def test_a_state_that_matches_nothing_is_left_out() -> None:
    found = differences(Scripted({"p": [1, 1, 1], "m": [5, 5, 5]}), Scripted({"p": [1, 1, 1], "x": [6, 6, 6]}))
    assert set(found.largest) == {"p"}


def test_nan_equals_nan_and_nothing_else() -> None:
    nan, number = {"p": [1.0, np.nan, np.inf]}, {"p": [1.0, 3.0, np.inf]}
    assert differences(Scripted(nan), Scripted(nan)).first is None
    assert differences(Scripted(nan), Scripted(number)).largest["p"] == np.inf
    assert differences(Scripted(number), Scripted({"p": [1.0, 3.0, -np.inf]})).first.element == (2,)


def test_other_shapes_are_refused_unless_they_hold_as_much() -> None:
    assert differences(Scripted({"p": [[1.0, 2.0]]}), Scripted({"p": [1.0, 2.0]})).first is None
    with pytest.raises(RulecError, match=r"p has shape \(3,\) on one side and \(2,\)"):
        differences(Scripted({"p": [1, 1, 1]}), Scripted({"p": [1, 1]}))


def test_values_come_in_the_order_of_their_lines() -> None:
    assert order_of_values(rulec.load("nadam").standalone()) == ["mu_product", "m", "v", "p"]
