"""Which rules of the library a test of machinery runs, and when.

Every day: one rule of each kind. With the slow tests: a sixteenth of the others, another sixteenth in each test; so it
is with other choices than rules that are marked `another`. `make whole` runs them all. What a rule itself claims, its
numbers and its peers, is tested for every rule, in tests/rules.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from functools import cache
from typing import Any

import pytest

import rulec
from rulec.language.rule_data import reads_layers
from tests.backends.kinds import BETWEEN, KINDS

#: One in so many of the other rules and choices runs with the slow tests.
SHARE = 16


@cache
def single() -> list[str]:
    """The rules that read one gradient in a step and nothing else.

    Those with passes are stepped by the tests of passes, those with inputs by tests/rules/test_inputs.py, and those of
    layers, whose parameters need names, by tests/rules/test_layers.py. The suite of backends and the oracle step all.
    """
    rules = {name: rulec.load(name) for name in rulec.rules()}
    return [name for name, rule in rules.items() if not (rule.passes or rule.inputs or reads_layers(rule))]


def by_kind(cases: Iterable[Any]) -> list[Any]:
    """Names of rules, or tuples that begin with one, as parameters: `another` where an everyday one is of its kind."""
    return [_parameter(case if isinstance(case, tuple) else (case,)) for case in cases]


def _parameter(case: tuple[Any, ...]) -> Any:
    return pytest.param(*case, marks=[pytest.mark.another] if case[0] in _others() else [])


def by_share(names: Iterable[str], test: str) -> list[Any]:
    """Lists of rules as parameters, for a slow test that runs many rules in one process: a share, and the others."""
    share = in_share(names := [*names], test)
    rest = [name for name in names if name not in share]
    return [
        pytest.param(share, marks=pytest.mark.slow, id="share"),
        pytest.param(rest, marks=[pytest.mark.slow, pytest.mark.whole], id="rest"),
    ]


def in_share(names: Iterable[str], test: str) -> list[str]:
    """The rules of a test's share, by a digest of both: a new rule moves no other."""
    return [name for name in names if zlib.crc32(f"{test} {name}".encode()) % SHARE == 0]


def rank(item: pytest.Item) -> None:
    """Marks a test of another rule of a kind `slow`, and all beyond a share `whole` too, by a digest of its name."""
    if item.get_closest_marker("another") is not None:
        item.add_marker(pytest.mark.slow)
        if zlib.crc32(item.nodeid.encode()) % SHARE:
            item.add_marker(pytest.mark.whole)


@cache
def _others() -> frozenset[str]:
    return frozenset(rulec.rules()) - {*KINDS, *BETWEEN}
