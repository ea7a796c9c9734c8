"""The backend that the manual writes passes the whole conformance suite, not only the rules that the page runs."""

from __future__ import annotations

from pathlib import Path

import pytest

import rulec
from rulec.language.node import walk
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

    backend = EagerBackend()
    report = check_backend(backend, arrays="torch")
    programs = {name: rulec.compile(loaded(name)) for name in rulec.rules()}
    taken = {
        name for name, found in programs.items()
        if found.elementwise and {n.op for n in walk(found.stages[0].roots) if n.args} <= backend.ops.keys()
    }  # fmt: skip
    assert "madgrad" not in taken
    assert len(taken) > 40
    assert set(report.refused) == programs.keys() - taken
    assert set(report.rules) == set(rulec.rules()) - set(report.refused)
    assert report.unmet == []
