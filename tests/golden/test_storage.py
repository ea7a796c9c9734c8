"""How the states of all rules of the library may be stored: tests/golden/storage.txt, line by line.

Every line was read against the mathematics of its rule. Read what changed before `--refresh-golden`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import rulec
from rulec import Rule
from rulec.analysis import storage
from tests.analysis.runs import COMPOSED

KEPT = Path(__file__).parent / "storage.txt"

#: Wrappers have states of their own once they wrap a rule.
WRAPPED = ("accumulate(adam)", "mechanic(sgd)", "adam >> orthogonalize")


def rows(text: str, rule: Rule) -> Iterator[str]:
    """A row for every state of a rule, and of the rule for other tensors."""
    for key, stored in storage(rule).items():
        yield f"{text:30} {key:10} {stored}"
    if rule.rest is not None:
        yield from rows(f"{text}, otherwise", rule.rest)


def table() -> str:
    """The rows of all rules."""
    texts = [*rulec.rules(wrappers=False), *COMPOSED, *WRAPPED]
    return "".join(f"{row}\n" for text in texts for row in rows(text, rulec.load(text)))


def test_the_storage_of_all_states_is_as_it_was_read(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--refresh-golden"):
        KEPT.write_text(table(), encoding="utf-8")
    assert table() == KEPT.read_text(encoding="utf-8"), "look at the change, and run pytest with --refresh-golden"
