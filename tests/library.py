"""Which rules of the library a test of machinery runs every day: one of each kind. The others run when slow.

What a rule itself claims (its numbers, its peers) is tested every day for every rule, in tests/rules.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import pytest

import rulec
from tests.backends.kinds import BETWEEN, KINDS


@cache
def single() -> list[str]:
    """The rules with one gradient in a step; those with passes are stepped by the tests of passes."""
    return [name for name in rulec.rules() if not rulec.load(name).passes]


def by_kind(cases: Iterable[Any]) -> list[Any]:
    """Names of rules, or tuples that begin with one, as parameters: slow where another rule shows the same kind."""
    return [_parameter(case if isinstance(case, tuple) else (case,)) for case in cases]


def _parameter(case: tuple[Any, ...]) -> Any:
    return pytest.param(*case, marks=[pytest.mark.slow] if case[0] in _others() else [])


@cache
def _others() -> frozenset[str]:
    return frozenset(rulec.rules()) - {*KINDS, *BETWEEN}
