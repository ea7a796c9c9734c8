"""The backend that the manual writes passes the whole conformance suite, not only the rules that the page runs."""

from __future__ import annotations

from collections.abc import Container
from pathlib import Path

import pytest

import rulec
from rulec.compiler.ir import Program
from rulec.compiler.layout import kernel_buffers
from rulec.language.expr.node import Op, walk
from rulec.testing import check_backend
from rulec.testing.cases import SHAPES, buckets_of, loaded
from tests.backends.kinds import KINDS
from tests.docs.markdown import ROOT, blocks
from tests.library import by_share


def expressible(program: Program, ops: Container[Op]) -> bool:
    """Of elements, of these operations, and without inputs."""
    inputs = any(buffer.role == "input" for buffer in kernel_buffers(program))
    return program.elementwise and not inputs and all(n.op in ops for n in walk(program.stages[0].roots) if n.args)


@pytest.mark.parametrize("names", by_share(rulec.rules(), "the manual's backend"))
def test_the_manuals_backend_is_one(names: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = blocks((ROOT / "docs" / "write-a-backend.md").read_text())
    (source,) = [block.text for block in page if block.title == "eager.py"]
    (tmp_path / "manuals_backend.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    from manuals_backend import EagerBackend  # type: ignore[import-not-found]

    backend = EagerBackend()
    report = check_backend(backend, list(dict.fromkeys([*KINDS, *names])), arrays="torch")
    programs = {name: [bucket.program for bucket in buckets_of(loaded(name), SHAPES)] for name in {*KINDS, *names}}
    taken = {name for name, found in programs.items() if all(expressible(each, backend.ops) for each in found)}
    assert "madgrad" not in taken
    assert len(taken & {*KINDS}) > 4
    assert len(taken) > 10
    assert set(report.refused) == programs.keys() - taken
    assert set(report.rules) == taken
    assert report.unmet == []
