"""The picture of small states."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.result import Result, read_result
from benchmarks.states import SPEEDS, STORAGES, WEIGHT_SPEEDS
from benchmarks.states_chart import distances_of, draw, speeds_of
from rulec.errors import RulecError
from tests.test_layering import ROOT

RECORDED = read_result(ROOT / "docs/benchmarks/states.json")


def test_the_bars_are_the_recorded_rows() -> None:
    rows = {(row.subject, row.measure[-12:]): row.value for row in RECORDED.rows}
    distances = distances_of(RECORDED)
    assert {*distances["digits, plain pixels"]} <= {*STORAGES}
    assert distances["digits, plain pixels"]["m in int8"] == rows["AdamW, m in int8", "plain pixels"]
    speeds = speeds_of(RECORDED)
    assert {*speeds["backend c"]} <= {*SPEEDS, *(f"weights {kind}" for kind in WEIGHT_SPEEDS)}
    for kind in ("split", "stochastic"):  # against float32; a split weight has a row against a master copy, too
        row = next(
            r for r in RECORDED.rows if r.subject.endswith(f", c, weights {kind}") and "with float32" in r.measure
        )
        assert speeds["backend c"][f"weights {kind}"] == row.value


def test_the_picture_is_a_png(tmp_path: Path) -> None:
    draw(RECORDED, tmp_path / "below" / "states.png")
    assert (tmp_path / "below" / "states.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(RulecError, match="there is nothing to draw"):
        draw(Result("states", [], True, 1), tmp_path / "x.png")
