"""What the manual says of defaults is so: every rule beside signatures and the record of its authors' values."""

from __future__ import annotations

from importlib import import_module

import pytest

import rulec
from tests.docs.defaults import AUTHORS, PAPER, alike, compared, defaults, differences, read, source

RULES = rulec.rules()

#: The packages whose signatures are read: imported here, so that no test's time has it.
PEERS = [import_module(name) for name in ("torch", "optax", "pytorch_optimizer")]


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_has_an_entry_where_it_has_defaults(rule: str) -> None:
    assert (rule in read()) == bool(defaults(rule))


def test_every_entry_is_of_a_rule_and_its_peer_of_these_packages() -> None:
    assert set(read()) <= set(RULES)
    peers = {entry["peer"].partition(".")[0] for entry in read().values() if "peer" in entry}
    assert peers == {package.__name__ for package in PEERS}


@pytest.mark.parametrize("rule", sorted(read()))
def test_entry_names_one_source_and_hyper_parameters_of_the_rule(rule: str) -> None:
    entry, names = read()[rule], set(defaults(rule))
    assert sum(key in entry for key in ("whose", "peer", "parts", "nothing")) == 1
    assert ("whose" in entry) == ("url" in entry) == ("defaults" in entry)
    for key in ("defaults", "names", "like", "why"):
        assert set(entry.get(key, {})) <= names, key
    assert source(rule) or "nothing" in entry, "the source has no default of any hyper-parameter"


@pytest.mark.parametrize("rule", sorted(rule for rule in read() if "nothing" not in read()[rule]))
def test_every_difference_has_a_reason_that_holds(rule: str) -> None:
    entry, differing = read()[rule], compared(rule).differing
    like, why = entry.get("like", {}), entry.get("why", {})
    assert sorted([*like, *why]) == sorted(differing)
    for name, other in like.items():
        assert alike(rule, name, other) == defaults(rule)[name], f"{other} has another {name}"


def test_rules_that_were_wrong_have_their_authors_defaults() -> None:
    for rule in ("dion", "gravity", "adax", "dadapt_lion", "adahessian", "spam"):
        assert read()[rule]["whose"] in (AUTHORS, PAPER)
        assert not set(compared(rule).differing) - {"rank"}, rule


def test_differences_name_rules_that_are_not_compared() -> None:
    text = differences()
    assert all(f"- [`{rule}`]" in text for rule, entry in read().items() if "nothing" in entry)
