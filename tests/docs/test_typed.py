"""No page has a figure of a measurement that nobody can trace, and what claims to be complete is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import rulec
from tests.docs.markdown import ROOT, pages
from tests.docs.typed import typed

#: docs/benchmarks.md is written by its command as a whole.
PAGES = [path for path in [*pages(), ROOT / "CONTRIBUTING.md"] if path.name != "benchmarks.md"]

#: README.md's words for how many names the library has.
HUNDREDS = ("", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_typed_figures_name_their_source(path: Path) -> None:
    assert list(typed(path.read_text())) == []


@pytest.mark.parametrize(
    ("text", "figures"),
    [
        ("A step takes 690 µs, and 4 rules.", ["690 µs", "4 rules"]),
        ("It is 3.5 times as fast,\nand needs 12% of 3 GB.", ["3.5 times as fast", "12%", "3 GB"]),
        ("On 2026-11-27 a step took 690 µs.", []),
        ("By `rulec bench gpu`:\n\n- 690 µs\n- 5 ms", []),
        ("By `rulec bench gpu`.\n\nA step takes 690 µs.", ["690 µs"]),
        ("A download may take 30 seconds, and at most 2 MB.", []),
        ("| part | bar |\n|---|---|\n| host | 30 µs |", []),
        ("| part | measured |\n|---|---|\n| host | 30 µs |", ["30 µs"]),
        ("<!-- generated: x -->\n\n30 µs\n\n<!-- end of x -->", []),
        ("```python\nx = '30 µs'\n```", []),
        ("A tensor of 3 rows; version 2.0 rules.", ["2.0 rules"]),
    ],
)
def test_a_figure_without_a_source_is_seen(text: str, figures: list[str]) -> None:
    assert [figure for _, figure in typed(text)] == figures


@pytest.mark.parametrize("name", ["rules.md", "rule-files.md", "comparisons.md"])
def test_pages_of_every_rule_have_every_rule(name: str) -> None:
    """A rule has a heading of its own, or stands in the first cell of a row."""
    page = (ROOT / "docs" / name).read_text()
    named = re.findall(r"^(?:## ([\w/]+) |\| \[?`([^`]+)`)", page, re.MULTILINE)
    words = set(re.findall(r"\w+", " ".join(heading or cell for heading, cell in named)))
    assert [rule for rule in rulec.rules() if rule.rpartition("/")[2] not in words] == []


def test_readme_says_how_many_rules_there_are() -> None:
    text = " ".join((ROOT / "README.md").read_text().split())
    assert f"More than {HUNDREDS[len(rulec.rules()) // 100]} hundred rules and transforms" in text
