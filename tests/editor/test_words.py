"""The words at a place of a rule, and what they mean."""

from __future__ import annotations

import pytest

from rulec.language.yaml.schema import RuleFile
from rulec.tools.language_server.answers import meaning_at, names_of, words_at

TEXT = """\
name: Mine
hyper: {lr: 1e-3, beta: 0.9}
state: {m: 0}
step: |
  m = beta*m + (1 - beta)*g
  w = sqrt(m)
  direction = w
"""


def offered(text: str, line: int, column: int) -> set[str]:
    return {word.name for word in words_at(text, line, column, names_of(text))}


def test_keys_rules_and_names_are_offered_where_they_may_stand() -> None:
    assert offered(TEXT, 0, 2) == {field.alias or name for name, field in RuleFile.model_fields.items()}
    assert {"beta", "m", "w", "sqrt", "g", "lr"} <= offered(TEXT, 5, 6)
    assert {"adam", "lookahead"} <= offered("name: A\nplus: [ad]\n", 1, 9)
    assert "sqrt" not in offered("name: A\nplus: [ad]\n", 1, 9)
    assert offered(TEXT, 0, 8) == set()


@pytest.mark.parametrize(
    "key", ["statistics: {largest: max(abs(update))}\n", "statistics:\n  agree: mean(m*g > 0)\n  largest: update\n"]
)
def test_the_update_is_a_word_under_statistics_alone(key: str) -> None:
    text, line = TEXT + key, len((TEXT + key).splitlines()) - 1
    column = text.splitlines()[line].index("update") + 2
    assert {"update", "p.stored", "m", "beta", "norm"} <= offered(text, line, column)
    assert not {"update", "p.stored"} & offered(text, 5, 6)
    word = meaning_at(text, line, column, names_of(text))
    assert word is not None
    assert word.meaning == "the change of the parameter in this step"
    assert meaning_at(text, 5, 2, names_of(text)) == names_of(text)["w"]


@pytest.mark.parametrize("key", ["variants: {be", "variants: {m: [1], be", "variants:\n  be"])
def test_hyper_parameters_are_offered_under_variants(key: str) -> None:
    lines = (TEXT + key).splitlines()
    assert offered(TEXT + key, len(lines) - 1, len(lines[-1])) == {"beta"}
    values = TEXT + "variants: {beta: [0.9, s"
    assert {"sqrt", "beta"} <= offered(values, 7, len(values.splitlines()[7]))


def test_broken_yaml_has_the_names_of_its_lines() -> None:
    assert {"m", "w"} <= names_of(TEXT.replace("0.9}", "0.9")).keys()
    assert names_of("- 1") == {}


def test_aliases_are_not_written_out() -> None:
    """Of each level ten times the level before: a hundred million numbers."""
    levels = "".join(f"x{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 9))
    assert names_of(f"x0: &a0 1\n{levels}hyper: {{lr: *a8}}\n") == {}


@pytest.mark.parametrize(
    ("line", "column", "meaning"),
    [
        (1, 19, "hyper-parameter `beta`: 0.9; at least 0 and below 1"),
        (5, 7, "```python\nsqrt(x)\n```\n"),
        (4, 26, "the gradient"),
        (5, 2, "`w = sqrt(m)`"),
        (2, 1, "Name: initial value"),
    ],
)
def test_meanings(line: int, column: int, meaning: str) -> None:
    word = meaning_at(TEXT, line, column, names_of(TEXT))
    assert word is not None
    assert word.meaning.startswith(meaning)


def test_a_rule_shows_its_step() -> None:
    word = meaning_at("name: A\nchain: [clip_by_value, lion]\n", 1, 24, {})
    assert word is not None
    assert "sign(" in word.meaning
    assert meaning_at(TEXT, 40, 0, {}) is None
