"""A traced value belongs to one run of one function: every way into another function is refused in one sentence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import rulec
from rulec import math as m
from rulec.errors import RuleError

Kept = dict[str, Any]


@pytest.fixture(scope="module")
def kept() -> Kept:
    """Values of every kind, left from the function of another rule."""
    left: Kept = {}

    def alpha(g: Any, s: Any, t: Any, *, lr: float = 0.1, n: float = 2, betas: Any = (0.9, 0.8)) -> Any:
        s.m = s.m + g + s.q[0] + s.q[1]
        s.h = g
        left.update(value=s.m * 2, truth=s.m > 0, n=n, beta=betas[0], s=s, q=s.q, t=t, g=g, lr=lr, level=m.axis(n))
        return s.m + s.h[1]

    states = {"m": 0, "q": {"init": 0, "count": 2}, "h": {"init": 0, "history": 2}}
    rulec.rule(state=states, hyper={"n": {"static": True, "whole": True, "min": 1}})(alpha)
    return left


#: What the function of another rule does with a value left -> the value it returns.
WAYS: dict[str, Callable[[Any, Any, Kept], Any]] = {
    "sum": lambda g, s, k: g + k["value"],
    "sum on the left": lambda g, s, k: k["value"] + 1,
    "negative": lambda g, s, k: -k["value"],
    "absolute value": lambda g, s, k: abs(k["value"]),
    "not": lambda g, s, k: m.where(~k["truth"], g, 0),
    "result": lambda g, s, k: k["value"],
    "argument": lambda g, s, k: k["g"],
    "step": lambda g, s, k: g * k["t"],
    "rate": lambda g, s, k: g * k["lr"],
    "entry of a list": lambda g, s, k: g * k["beta"],
    "function": lambda g, s, k: m.sqrt(k["value"]),
    "matrix function": lambda g, s, k: m.newton_schulz(k["value"]),
    "function of numpy": lambda g, s, k: np.float64(2) * k["value"],
    "condition of where": lambda g, s, k: m.where(k["truth"], g, 0),
    "arm of where": lambda g, s, k: m.where(g > 0, g, k["value"]),
    "condition of cond": lambda g, s, k: m.cond(k["truth"], lambda: g, lambda: -g),
    "arm of cond": lambda g, s, k: m.cond(m.mean(g) > 0, lambda: g, lambda: k["value"]),
    "state": lambda g, s, k: setattr(s, "m", k["value"]),
    "state in an arm": lambda g, s, k: m.cond(m.mean(g) > 0, lambda: setattr(s, "m", k["value"]), lambda: None),
    "states of the other": lambda g, s, k: g + k["s"].m,
    "states of the other assigned": lambda g, s, k: setattr(k["s"], "m", g),
    "list of the other": lambda g, s, k: g + k["q"][0],
    "list of the other assigned": lambda g, s, k: k["q"].__setitem__(0, g),
    "list of the other in a loop": lambda g, s, k: sum(k["q"]) * g,
    "loop": lambda g, s, k: g * sum(1 for _ in range(k["n"])),
    "index": lambda g, s, k: [g, g, g][k["n"]],
    "level": lambda g, s, k: m.mean(g, per=k["level"]),
    "number of a level": lambda g, s, k: m.mean(g, per=m.block(k["n"])),
    "slice": lambda g, s, k: g[: k["n"]],
    "slice of it": lambda g, s, k: k["value"][:2],
    "extent of a draw": lambda g, s, k: g + m.uniform([k["n"], 3], at=1),
    "place of a draw": lambda g, s, k: g + m.uniform([3, 4], at=k["t"]),
    "input of a rule": lambda g, s, k: rulec.load("adam")(k["value"]),
}


@pytest.mark.parametrize("way", [*WAYS])
def test_a_value_of_another_rule(way: str, kept: Kept) -> None:
    def beta(g: Any, s: Any, *, lr: float = 0.1) -> Any:
        result = WAYS[way](g, s, kept)
        return g if result is None else result

    with pytest.raises(RuleError, match="belongs to the function of Alpha, and its names mean others in Beta") as error:
        rulec.rule(state={"m": 0})(beta)
    assert error.value.place


def test_a_value_of_another_rule_as_a_default(kept: Kept) -> None:
    def of_keyword(g: Any, *, k: Any = kept["value"]) -> Any:
        return k * g

    def of_position(g: Any, left: Any = kept["value"]) -> Any:
        return left * g

    for function, problem in ((of_keyword, "the default of k"), (of_position, "has an argument 'left'")):
        with pytest.raises(RuleError, match=problem):
            rulec.rule(function)


def test_a_value_of_another_rule_as_a_first_state(kept: Kept) -> None:
    with pytest.raises(RuleError, match="begins as a number or an expression"):
        rulec.rule(state={"m": kept["value"]})(lambda g, s: s.m)


def test_a_value_outside_of_functions(kept: Kept) -> None:
    with pytest.raises(RuleError, match="a value of the function of Alpha has no meaning outside of it"):
        kept["value"] + 1


def test_a_value_of_an_earlier_run() -> None:
    left: list[Any] = []

    def gamma(g: Any, *, lr: float = 0.1) -> Any:
        left.append(2 * g)
        return left[0]

    assert rulec.rule(gamma).step_text() == "direction = 2*g"
    with pytest.raises(RuleError, match="left from an earlier run of the function of Gamma"):
        rulec.rule(gamma)


def test_values_pass_between_functions_of_one_rule() -> None:
    def half(x: Any) -> Any:
        return x / 2

    def delta(g: Any, s: Any, *, lr: float = 0.1) -> Any:
        s.m = half(s.m) + half(g)
        return m.cond(m.mean(g) > 0, lambda: half(s.m), lambda: s.m)

    assert rulec.rule(state={"m": 0})(delta).step_text().startswith("m = m/2 + g/2")


def _itself(g: Any) -> Any:
    return _itself(g * 2)


def _one(g: Any) -> Any:
    return _other(g)


def _other(g: Any) -> Any:
    return _one(g) + 1


def _in_arm(g: Any) -> Any:
    return m.cond(m.mean(g) > 0, lambda: _in_arm(g + 1), lambda: g)


def _rule_of_itself(g: Any) -> Any:
    return rulec.rule(_rule_of_itself)(g)


@pytest.mark.parametrize("function", [_itself, _one, _in_arm, _rule_of_itself])
def test_a_function_without_end(function: Callable[..., Any]) -> None:
    with pytest.raises(RuleError, match="this call leads to itself again and never ends") as error:
        rulec.rule(function)
    assert error.value.place
