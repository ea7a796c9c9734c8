"""The tables of tests of other projects that pass with classes of rulec, from docs/data/suites.json."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from tests.docs.table import table
from tests.suites.__main__ import FILE, SUITES


def read() -> dict[str, Any]:
    """The outcome of every suite, by its name."""
    return dict(json.loads(FILE.read_text()))


def counts() -> str:
    """The table of suites, with the tests that pass."""
    rows = [
        [f"{suite}, `{SUITES[suite][0]}`", each["version"], str(each["tests"]), str(each["passed"])]
        for suite, each in sorted(read().items())
    ]
    return table(["tests", "version", "meet a class of rulec", "pass"], rows)


def reasons() -> str:
    """A table for each suite with the failing tests' messages, and the number of tests."""
    parts = []
    for suite, each in sorted(read().items()):
        rows = sorted(([str(len(tests)), message] for message, tests in each["failed"].items()), key=_order)
        if rows:
            parts.append(f"## {suite}\n\n{table(['tests', 'reason'], rows)}")
    return "\n\n".join(parts)


def _order(row: list[str]) -> tuple[int, str]:
    """The most frequent first."""
    return -int(row[0]), row[1]


MAKERS: Mapping[str, Callable[[], str]] = {"suites": counts, "suite-reasons": reasons}
