"""What is made from the code is what the pages hold, and what was measured was measured of these rules."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks.result import Result, Row, read_result
from rulec.compiler.pipeline import PASSES
from rulec.language.yaml.schema import RuleFile
from tests.docs import peers
from tests.docs.figures import FOLDER, HEADLINES, benchmarks
from tests.docs.generated import MAKERS
from tests.docs.markdown import ROOT, pages, with_generated
from tests.rules.peers import PEERS
from tests.rules.test_peers import RELATIVE_FLOAT64, ULPS_FLOAT32


@pytest.mark.parametrize("path", pages(), ids=lambda path: path.name)
def test_page_is_fresh(path: Path) -> None:
    text = path.read_text()
    assert with_generated(text, MAKERS) == text, f"run: python -m tests.docs.refresh {path.name}"


def test_every_maker_is_used() -> None:
    used = {name for path in pages() for name in re.findall(r"<!-- generated: ([\w-]+) -->", path.read_text())}
    assert used == set(MAKERS)


def test_comparison_is_of_these_rules() -> None:
    """Measured again with `python -m tests.docs.peers` when a rule, its peers or the values compared have changed."""
    rows = {(row["rule"], row["peer"]): row["digest"] for row in peers.read()["rows"]}
    assert rows == {(peer.composed, peer.theirs): peers.digest(peer) for peer in peers.rows()}


def test_measured_differences_are_within_bounds() -> None:
    for row in peers.read()["rows"]:
        assert row["float64_relative"] <= RELATIVE_FLOAT64
        assert row.get("float32_ulps", 0) <= ULPS_FLOAT32


def test_one_row_measured_again() -> None:
    """The figures come from this code: one row, which packages and processors round alike."""
    row = next(row for row in peers.read()["rows"] if row["rule"] == "sgd")
    again = peers.measured(next(peer for peer in PEERS if peer.composed == "sgd"))
    assert again == row


def test_readme_has_the_headlines(tmp_path: Path) -> None:
    subject, measure = HEADLINES[0].split(": ")
    rows = [Row(subject, measure, 1.06, 1), Row("lion, float32", "of the limit", 0.9, 0.95)]
    (tmp_path / "rules.json").write_text(json.dumps(Result("rules", rows, quick=False, threads=2).data()))
    text = benchmarks(tmp_path)
    assert f"| {HEADLINES[0]} | 1.06 | " in text
    assert "lion" not in text
    assert "lion" not in text


def test_every_headline_was_measured() -> None:
    files = sorted(FOLDER.glob("*.json"))
    rows = [row.what for file in files for row in read_result(file).rows]
    assert not files or set(HEADLINES) <= set(rows)


def test_every_key_of_a_rule_file_is_described() -> None:
    text = (ROOT / "docs" / "language.md").read_text()
    section = text[text.index("## The whole rule file") :]
    lines = [line for line in section[: section.index("\n\n", section.index("| `name`"))].splitlines() if "| `" in line]
    described = [key for line in lines for key in re.findall(r"`(\w+)`", line.split(" | ")[0])]
    assert sorted(described) == sorted(RuleFile.model_fields)


def test_contributing_names_places_that_are_there() -> None:
    """`rules/NAME.yaml` stands for a file of the folder before `NAME`."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    section = text[text.index("## Where things are") : text.index("### Circles")]
    places = [place.partition("NAME")[0] for place in re.findall(r"`((?:rulec|backends|rules|tests)/[^`]*)`", section)]
    assert len(places) > 20
    assert [place for place in places if not (ROOT / place).exists()] == []


def test_every_pass_is_walked_through() -> None:
    text = (ROOT / "docs" / "how-it-works.md").read_text()
    assert re.findall(r"^### (\w+)$", text, re.MULTILINE) == ["lower", *(name for name, _ in PASSES), "choose_rereads"]
