"""The tables of the page on evolution strategies, from rows that are made up."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.es.cosine import EQUAL_MEMBERS, EQUAL_TIME
from benchmarks.es.fused import OURS
from benchmarks.es.layers import ALONE, BASE, JUDGED, KEPT
from benchmarks.es.spsa import TIME, WRITTEN
from benchmarks.result import Result, Row
from tests.docs import es_tables
from tests.docs.es_tables import MAKERS, maker

ROWS = [
    Row(f"{JUDGED}, signflip", BASE, 1.84, 2.1, "at most"), Row(f"{JUDGED}, signflip", ALONE, 93.4),
    Row(f"{JUDGED}, signflip", KEPT, 4096.0, unit="B"), Row("conv 16 to 16, 3x3, on 64x64, signflip", BASE, 2.5),
    Row("lion, popcount, 16 directions", OURS, 0.61), Row("spsa, normal", TIME, 0.5), Row("spsa, normal", WRITTEN, 1.0),
    Row("MeZO in torch", WRITTEN, 4.0), Row("signflip", EQUAL_MEMBERS, 0.1234, detail={"spread": 0.01, "members": 256}),
    Row("signflip", EQUAL_TIME, 0.2, detail={"spread": 0.02, "members": 300}),
]  # fmt: skip


def test_every_row_stands_in_its_place(tmp_path: Path) -> None:
    file = tmp_path / "es.json"
    file.write_text(json.dumps(Result("es", ROWS, quick=False, threads=2).data()))
    text = {name: maker(getattr(es_tables, name.removeprefix("es-")), file)() for name in MAKERS}
    assert "| signflip |  |  | 1.84 (93.4) |" in text["es-layers"]
    assert "| 16 to 16, 3x3, on 64x64 |" in text["es-layers"]
    assert "| signflip | 1.84 |  |  | 4096 B |" in text["es-judged"]
    assert "| lion, popcount, 16 directions | 0.61 |  |" in text["es-fused"]
    assert "| MeZO in torch | 4.00 |  |  |\n| spsa, normal | 1.00 |  | 0.50 |" in text["es-spsa"]
    assert "| signflip | 0.123 ± 0.010, of 256 | 0.200 ± 0.020, of 300 |" in text["es-cosines"]


def test_without_results_it_says_how_to_get_them(tmp_path: Path) -> None:
    assert maker(es_tables.layers, tmp_path / "es.json")() == es_tables._NONE
