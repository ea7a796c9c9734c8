"""The backend that the manual writes passes the whole conformance suite, not only the rules that the page runs."""

from __future__ import annotations

from pathlib import Path

import pytest

import rulec
from rulec.testing import check_backend
from rulec.testing.cases import loaded
from tests.docs.markdown import ROOT, blocks


@pytest.mark.slow
def test_the_manuals_backend_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = blocks((ROOT / "docs" / "write-a-backend.md").read_text())
    (source,) = [block.text for block in page if block.title == "eager.py"]
    (tmp_path / "manuals_backend.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    from manuals_backend import EagerBackend  # type: ignore[import-not-found]

    report = check_backend(EagerBackend(), arrays="torch")
    staged = {name for name in rulec.rules() if not rulec.compile(loaded(name)).elementwise}
    assert set(report.refused) == staged | {"madgrad"}
    assert set(report.rules) == set(rulec.rules()) - set(report.refused)
    assert report.unmet == []
