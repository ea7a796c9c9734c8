"""The families of the library: every rule is in one, and those of well-known rules are read off their expressions."""

from __future__ import annotations

import pytest

import rulec
from tests.docs.families import FAMILIES, NAMED, families, family_of


def test_every_rule_is_in_one_family() -> None:
    found = families()
    assert sorted(name for names in found.values() for name in names) == rulec.rules()
    assert [*found] == [*FAMILIES]


def test_named_rules_are_there_once() -> None:
    named = [name for names in NAMED.values() for name in names]
    assert len(named) == len({*named})
    assert {*named} <= {*rulec.rules()}


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("momentum", "Gradient descent and momentum"),
        ("adamw", "Adaptive"),
        ("adagrad", "Adaptive"),
        ("lion", "Sign"),
        ("adafactor", "Factored"),
        ("came", "Factored"),
        ("muon", "Matrix, orthogonalized"),
        ("shampoo", "Matrix, decomposed"),
        ("galore", "Matrix, decomposed"),
        ("transforms/clip_by_value", "Clipping and normalization"),
        ("transforms/decay", "Other transforms"),
        ("transforms/lookahead", "Wrappers"),
    ],
)
def test_families_are_derived(name: str, family: str) -> None:
    assert name not in {each for names in NAMED.values() for each in names}
    assert family_of(name) == family
