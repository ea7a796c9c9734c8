"""`rulec bench orthogonal`: the errors of Newton-Schulz, and the manual's table of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks import orthogonal
from benchmarks.page import figure
from benchmarks.result import read_result
from benchmarks.suite import measurement

DOCS = Path(__file__).parents[2] / "docs"


def test_every_form_has_its_largest_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orthogonal, "QUICK_SHAPES", ((8, 24),))
    monkeypatch.setattr(orthogonal, "gradients", lambda steps: [np.eye(4, 12, dtype=np.float32)])
    monkeypatch.setattr(orthogonal, "SCHEDULES", ("muon",))
    ticks: list[None] = []
    result = orthogonal.measure(True, lambda: ticks.append(None))
    assert len(ticks) == measurement("orthogonal", True).parts == 1
    assert [row.subject for row in result.rows[::2]] == [
        "muon, the gram form", *(f"muon, gram, {name}" for name in orthogonal.FORMS)
    ]  # fmt: skip
    assert [row.target for row in result.rows[:3]] == [1.0, 1.0, None]
    for row in result.rows:
        k = (orthogonal.FROBENIUS, orthogonal.SPECTRAL).index(row.measure)
        assert row.value == row.detail["error"] / row.detail["Muon's own"] >= row.detail["median share"]
        assert row.detail["of"] in dict(orthogonal.cases(True))
        assert k == result.rows.index(row) % 2


def test_matrices_have_their_spectra() -> None:
    matrices = dict(orthogonal.cases(True))
    for name, spectrum in orthogonal.SPECTRA.items():
        matrix = matrices[f"32 by 96, {name}, condition 10000"]
        values = np.linalg.svd(matrix.astype(np.float64), compute_uv=False)
        np.testing.assert_allclose(values, np.sort(spectrum(32, 1e4))[::-1], rtol=1e-3, atol=1e-6)
        zeros = name == "half of them zero"
        least = values[15 if zeros else -1]
        assert values[0] / least == pytest.approx(1e4, rel=2e-2)
        assert bool(values[-1] < 1e-6) is zeros
    assert matrices["gradient 0 of a small model, 192 by 64"].shape == (192, 64)


def test_other_forms_are_those_of_the_library_where_it_has_them() -> None:
    """With float16 and blocks of two: but for the order of sums, what the library computes."""
    for name, matrix in list(orthogonal.cases(True))[:10]:
        ours = orthogonal.by_library(matrix, "quintic", "gram")
        theirs = orthogonal.by_form(matrix, "quintic", ("float16", "float16", (2, 2, 1)))
        if matrix.shape[0] != matrix.shape[1]:
            assert np.linalg.norm(ours - theirs) <= 2.0**-7 * np.linalg.norm(ours), name


def test_the_manual_has_the_measured_errors() -> None:
    """And the form of the library is no less exact than Muon's own, of which the page says so."""
    result = read_result(DOCS / "benchmarks" / "orthogonal.json")
    page = (DOCS / "gpu.md").read_text()
    assert all(row.met for row in result.rows if row.target is not None)
    errors = {(row.subject.partition(", ")[0], row.subject.partition(", ")[2], row.measure): row for row in result.rows}
    for name in ("the gram form", *(f"gram, {name}" for name in orthogonal.FORMS)):
        cells = [
            ", ".join(
                figure(errors[schedule, name, measure]) for measure in (orthogonal.FROBENIUS, orthogonal.SPECTRAL)
            )
            for schedule in orthogonal.SCHEDULES
        ]
        ours = name == "the gram form"
        title = "**the form of the library: float16, restarts after 2 and 4**" if ours else name.removeprefix("gram, ")
        line = " | ".join([title, *(f"**{cell}**" if ours else cell for cell in cells)])
        assert f"| {line} |" in page
