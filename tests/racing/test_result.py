"""What a race says: best rates, edges, divergence, good rates; as text, JSON, CSV and a page."""

from __future__ import annotations

import csv
import io
import json
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

import rulec
from rulec.errors import RulecError
from rulec.tools.race.outcome import Grid, Outcome
from rulec.tools.race.page import EDGE, cells
from rulec.tools.race.result import Result

RATES = (1e-4, 1e-3, 1e-2, 1e-1)


def outcome(*final: float, label: str = "rule", first: float = 10.0) -> Outcome:
    """Runs of two seeds that begin at `first` and end a little around `final`."""
    ends = np.array(final)[:, None] + np.array([-0.1, 0.1])
    losses = np.stack([np.full_like(ends, first), ends])
    return Outcome(label, Grid(RATES[: len(final)], (0, 1)), losses, {"test accuracy": ends / 10}, 1.0)


def test_the_best_rate_has_the_lowest_mean_loss() -> None:
    row = outcome(5, 2, 1, 4).row()
    assert (row["lr"], row["at_edge"], row["diverged"]) == (1e-2, False, 0)
    assert row["loss"] == pytest.approx(1)
    assert row["spread"] == pytest.approx(0.1 * 2**0.5)
    assert row["test accuracy"] == pytest.approx(0.1)


@pytest.mark.parametrize("final", [(1, 2, 3, 4), (4, 3, 2, 1)])
def test_a_best_rate_at_the_edge_is_marked(final: tuple[float, ...]) -> None:
    one = outcome(*final)
    assert one.at_edge
    assert cells(one)[1].endswith("*")
    assert cells(one)[-3].endswith("+")
    assert EDGE in Result("t", [one]).table()
    assert not outcome(1).at_edge  # of one rate


def test_good_rates_keep_nine_tenths_of_the_progress() -> None:
    # From 10 to 1: the limit is 1.9. The last rate is good by itself, and not next to the best.
    assert outcome(1.8, 1, 2.0, 1.5).good == (0, 1)
    wide = outcome(9, 1, 1.8, 1.8)
    assert wide.row()["good_high"] == 1e-1
    assert cells(wide)[-3] == "1.0e-3–1.0e-1 x100+"
    assert cells(outcome(9, 1, 9, 9))[-3] == "1.0e-3 x1"


def test_a_rate_with_a_diverged_seed_is_not_the_best() -> None:
    final = outcome(5, 2, np.nan, 4)
    assert (final.row()["lr"], final.row()["diverged"]) == (1e-3, 2)
    assert final.runs()[4]["diverged_at"] == 2
    lost = outcome(*[np.nan] * 4, label="lost")
    assert lost.row()["lr"] is None
    assert cells(lost)[1:3] == ["none", "diverged"]
    assert cells(lost)[-2] == "8 of 8"


@pytest.fixture(scope="module")
def result() -> Result:
    return rulec.race(["sgd", "adam"], "rosenbrock", lr=(1e-3, 1.0), rates=4, seeds=2, steps=30)


def test_rows_are_in_the_order_of_their_losses(result: Result) -> None:
    losses = [row["loss"] for row in result.rows]
    assert losses == sorted(losses)
    assert result.best == result.rows[0]
    assert [line.split()[0] for line in result.table().splitlines()[2:4]] == [row["rule"] for row in result.rows]


def test_json_and_csv_hold_every_run(result: Result, tmp_path: Path) -> None:
    result.json(tmp_path / "new" / "race.json")
    data = json.loads((tmp_path / "new" / "race.json").read_text())
    assert len(data["runs"]) == 2 * 4 * 2
    assert [run["loss"] for run in data["runs"] if run["diverged_at"]] == [None] * data["rules"][1]["diverged"]
    assert data["rules"][1]["diverged"] >= 2
    assert len(data["curves"]["adam"]["losses"]) == 2
    lines = [*csv.DictReader(io.StringIO(result.csv()))]
    assert [(line["rule"], float(line["lr"]), int(line["seed"])) for line in lines] == [
        (run["rule"], run["lr"], run["seed"]) for run in data["runs"]
    ]
    with pytest.raises(RulecError, match="cannot be written"):
        result.csv(tmp_path / "new" / "race.json" / "race.csv")


class References(HTMLParser):
    """The tags of a page, and the addresses that a browser would read."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [f"{name}={value}" for name, value in attrs if name in ("src", "href", "srcset", "data")]


def test_the_page_reads_nothing_from_elsewhere(result: Result, tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    named = Result("<task>", [outcome(5, 2, np.nan, 4, label="<script>alert(1)</script>"), *result.outcomes])
    named.html(tmp_path / "race.html")
    text = (tmp_path / "race.html").read_text()
    page = References()
    page.feed(text)
    assert page.addresses == []
    assert page.tags.count("table") == 1
    assert "<script>alert(1)" not in text
    assert text.count("Plotly.newPlot(") >= 2
    assert "@import" not in text[: text.index("<script")]


def test_without_plotly_the_page_says_what_it_needs(result: Result, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "plotly", None)
    with pytest.raises(RulecError, match=r"needs plotly, which is not installed: pip install .*\[race\]"):
        result.html("race.html")


def test_a_notebook_shows_the_table(result: Result) -> None:
    table = References()
    table.feed(result._repr_html_())
    assert table.tags.count("tr") == 3
    assert table.addresses == []
