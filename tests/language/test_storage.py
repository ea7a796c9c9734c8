"""The key `storage`: states that stay float32, in rule files, in Python, and in what rules are composed to."""

from __future__ import annotations

import rulec
import rulec.math
from rulec import Rule

ANCHORED = """
name: Anchored
hyper: {pull: 0.1}
state: {m: 0, v: 0}
storage: {v: exact}
step: |
  m = m + g
  v = maximum(v, abs(g))
  direction = m/v + pull*p
"""


def exact(rule: Rule) -> set[str]:
    """The states that a rule keeps exact."""
    return {key for key, state in rule.state.items() if state.storage == "exact"}


def test_a_rule_file_marks_its_states() -> None:
    rule = rulec.parse(ANCHORED)
    assert exact(rule) == {"v"}
    assert "storage: {v: exact}" in rule.to_yaml()
    assert rulec.parse(rule.to_yaml()) == rule
    assert rulec.parse(ANCHORED.replace("storage: {v: exact}\n", "")) != rule


def test_a_rule_in_python_does_too() -> None:
    @rulec.rule(state={"m": 0, "v": 0}, storage={"v": "exact"})
    def anchored(g, p, s, *, pull=0.1):  # type: ignore[no-untyped-def]
        s.m = s.m + g
        s.v = rulec.math.maximum(s.v, rulec.math.abs(g))
        return s.m / s.v + pull * p

    assert exact(anchored) == {"v"}
    assert anchored.state == rulec.parse(ANCHORED).state


def test_compositions_keep_the_mark_under_the_new_names() -> None:
    rule, adam = rulec.parse(ANCHORED), rulec.load("adam")
    assert exact(adam + rule) == {"anchored.v"}
    assert exact(rulec.load("clip_by_value") >> rule) == {"v"}
    assert exact(rulec.load("lookahead")(rule)) == {"v"}
    assert exact(rule.bind(pull="lr/2")) == {"v"}
    called = rulec.parse("name: R\nuses: [adam]\nstep: |\n  direction = adam(g)\nstorage: {adam.m: exact}\n")
    assert exact(called) == {"adam.m"}
    assert exact(called + rule) == {"adam.m", "v"}


def test_a_composed_file_marks_states_of_its_parts() -> None:
    rule = rulec.parse("name: R\nplus: [adam, momentum]\nstorage: {adam.m: exact}\n")
    assert exact(rule) == {"adam.m"}
    assert rulec.parse(rule.to_yaml()) == rule


def test_a_rule_called_in_python_keeps_its_mark() -> None:
    inner = rulec.parse(ANCHORED)

    @rulec.rule(storage={"n": "exact"}, state={"n": 0})
    def outer(g, s):  # type: ignore[no-untyped-def]
        s.n = s.n + g
        return inner(s.n)

    assert exact(outer) == {"n", "anchored.v"}


def test_the_step_compiles_to_the_same_program() -> None:
    plain = rulec.parse(ANCHORED.replace("storage: {v: exact}\n", ""))
    assert rulec.compile(plain).stages == rulec.compile(rulec.parse(ANCHORED)).stages
