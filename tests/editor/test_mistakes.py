"""All mistakes of a text at once, at their places."""

from __future__ import annotations

import pytest

import rulec
from rulec.tools.language_server.answers import Mistake, mistakes

WRONG = """\
name: Wrong
hyper: {lr: 1e-3, beta: 0.9, gamma: bta*2}
state: {m: 0, v: q}
step: |
  m = beta*m + (1 - bet)*g
  w = sqr(m)
  x = w + 1
  if t > kk:
    v = w
  z += 1
  for i in range(3):
    v = v + nope
  direction = m + v + x
"""


def test_every_mistake_has_its_place_and_one_message() -> None:
    places = [(each.line + 1, each.column + 1, each.width, each.message.partition(";")[0]) for each in mistakes(WRONG)]
    assert places == [
        (2, 37, 3, "unknown name 'bta'"),
        (3, 18, 1, "unknown name 'q': known here are lr, beta, gamma, ndim, numel, rows, cols, machine_eps, p"),
        (5, 21, 3, "unknown name 'bet'"),
        (6, 7, 3, "unknown function 'sqr'"),
        (8, 10, 2, "unknown name 'kk': declare it under hyper or state, or assign it first"),
        (10, 3, 6, "this line is not part of a step: write z = z ... in full"),
        (12, 13, 4, "unknown name 'nope': declare it under hyper or state, or assign it first"),
    ]


def test_the_error_is_the_first_mistake_with_the_others_in_it() -> None:
    with pytest.raises(rulec.RuleError, match=r"^<string>:2:37: unknown name 'bta'; did you mean 'beta'\?\n") as error:
        rulec.parse(WRONG)
    assert len(error.value.others) == 6


def test_a_step_that_is_no_python_does_not_hide_other_mistakes() -> None:
    text = "name: A\nstate: {v: q}\nstep: |\n  direction = (g\n"
    assert [each.line for each in mistakes(text)] == [1, 3]


def test_a_rule_has_none() -> None:
    path = rulec.load("adamw").path
    assert path is not None
    assert mistakes(path.read_text(), path.parent) == []


def test_what_has_no_place_is_at_the_beginning() -> None:
    assert mistakes("- 1\n")[0].line == 0
    (mistake,) = mistakes("name: A\nplus: [adam, nobody.yaml]\n")
    assert mistake == Mistake("there is no rule file 'nobody.yaml'", 1, 13, 11, "missing")


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("name: [", "yaml"),
        ("name: A\nstep: direction = g\nhypr: {}\n", "key"),
        ("name: A\nhyper: {for: 1}\nstep: direction = g\n", "key"),
        ("name: A\nplus: [adam, nobody]\n", "missing"),
        ("name: A\nplus: [adam, {decay: {rate: 1}}]\n", "component"),
        ("name: A\nstep: direction = h\n", "expression"),
        ("name: A\nhyper: {lr: x}\nstep: direction = g\n", "expression"),
        ("name: A\nstate: {m: 0}\nstep: direction = g\n", "rule"),
    ],
)
def test_every_mistake_has_a_code(text: str, code: str) -> None:
    assert {each.code for each in mistakes(text)} == {code}
