"""A rule's digest follows its equations: words around them do not change it, and any other equation does."""

from __future__ import annotations

import pytest

import rulec
from rulec.checkpoint import meaning

TEXT = """
name: Own
hyper: {lr: 0.1, beta: 0.9}
state: {m: 0, c: {init: 1, per: tensor}}
step: |
  c = c*beta
  m = beta*m + (1 - beta)*g
  scaled = m/(1 - c)
  if ndim >= 2:
    scaled = 2*scaled
  direction = scaled
"""

SAME = (
    ("name", "name: Own", "name: Another"),
    ("summary", "hyper:", "summary: What it does.\nhyper:"),
    ("comment", "  c = c*beta", "  # why\n  c = c*beta"),
    ("default", "beta: 0.9", "beta: 0.99"),
    ("range", "beta: 0.9", "beta: {default: 0.9, min: 0.5}"),
    ("static", "beta: 0.9", "beta: {default: 0.9, static: true}"),
    ("local", "scaled", "m_hat"),
    ("order of states", "m: 0, c: {init: 1, per: tensor}", "c: {init: 1, per: tensor}, m: 0"),
    ("parentheses", "c = c*beta", "c = (c*beta)"),
    ("whole step", "direction = scaled", "step_size = scaled\n  p = p - lr*step_size"),
    ("where it applies", "step: |", "applies_to: ndim == 2\notherwise: sgd\nstep: |"),
)

OTHER = (
    ("operator", "beta*m + (1", "beta*m - (1"),
    ("constant", "2*scaled", "3*scaled"),
    ("condition", "ndim >= 2", "ndim >= 3"),
    ("order of lines", "c = c*beta\n  m = beta*m + (1 - beta)*g", "m = beta*m + (1 - beta)*g\n  c = c*beta*m**0"),
    ("first value", "m: 0", "m: 1"),
    ("level", "per: tensor", "per: group"),
    ("name of a state", "m: 0", "n: 0"),
    ("hyper-parameter", "beta", "gamma"),
    ("skip", "step: |", "skip: not isfinite(sum(g))\nstep: |"),
    ("view", "step: |", "view: {flatten: rest}\nstep: |"),
    ("evaluation", "step: |", "evaluate: p + m\nstep: |"),
)


def changed(old: str, new: str) -> rulec.Rule:
    assert old in TEXT
    text = TEXT.replace(old, new)
    return rulec.parse(text.replace("m =", "n =").replace("*m ", "*n ").replace("m/", "n/") if new == "n: 0" else text)


@pytest.mark.parametrize(("old", "new"), [row[1:] for row in SAME], ids=[row[0] for row in SAME])
def test_words_change_nothing(old: str, new: str) -> None:
    assert meaning(changed(old, new)) == meaning(rulec.parse(TEXT))


@pytest.mark.parametrize(("old", "new"), [row[1:] for row in OTHER], ids=[row[0] for row in OTHER])
def test_another_equation_is_another_rule(old: str, new: str) -> None:
    assert meaning(changed(old, new)) != meaning(rulec.parse(TEXT))


def test_composed_rules_mean_what_their_parts_do() -> None:
    assert meaning(rulec.load("adam + decay")) == meaning(rulec.load("adamw"))
    assert meaning(rulec.load("l2 >> adam")) != meaning(rulec.load("adam"))
    assert meaning(rulec.parse(rulec.load("schedule_free_adamw").to_yaml())) == meaning(
        rulec.load("schedule_free_adamw")
    )


def test_rules_of_the_library_that_are_apart_have_digests_apart() -> None:
    rules = [rule for name in rulec.rules() if not (rule := rulec.load(name)).wraps]
    digests: dict[str, set[str]] = {}
    for rule in rules:
        digests.setdefault(meaning(rule), set()).add(rule.standalone().step_text())
    assert all(len(texts) == 1 for texts in digests.values())
    assert len(digests) > 50


def test_digests_stay_what_they_are() -> None:
    """Files hold them: one that changes makes every file of that rule another rule's."""
    assert meaning(rulec.load("adam"))[:16] == "10f26af2a40af837"
    assert meaning(rulec.load("schedule_free_adamw"))[:16] == "9b39f67e47f7f298"
    assert meaning(rulec.load("adafactor"))[:16] == "f96ae43dc1e70abf"
