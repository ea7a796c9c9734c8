"""What a notebook shows of a rule."""

from __future__ import annotations

import pytest

import rulec


def test_a_rule_shows_its_formula_and_its_cost() -> None:
    shown = rulec.load("adamw")._repr_markdown_()
    assert shown.startswith("**AdamW**\n")
    assert f"$$\n{rulec.load('adamw').latex()}\n$$" in shown
    assert "`weight_decay` = 0.01" in shown
    assert "reads 16 bytes and writes 12" in shown
    assert "[Decoupled Weight Decay Regularization](https://arxiv.org/abs/1711.05101)" in shown


@pytest.mark.parametrize("name", ["transforms/lookahead", "muon", "momo", "transforms/decay"])
def test_rules_of_every_kind_have_one(name: str) -> None:
    rule = rulec.load(name)
    assert rule._repr_markdown_().startswith(f"**{rule.name}**")


def test_a_default_that_follows_another_is_its_expression() -> None:
    rule = rulec.parse("name: R\nhyper: {lr: 0.1, beta: 1 - lr}\nstep: |\n  direction = beta*g\n")
    assert "`beta` = `1 - lr`" in rule._repr_markdown_()
