"""`rulec cache`."""

from __future__ import annotations

from pathlib import Path

import pytest

from rulec.backend.cache import entry, write_atomically
from tests.cli.running import run, run_json


@pytest.fixture
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("RULEC_CACHE_DIR", str(tmp_path))
    return tmp_path


def test_kernels_are_counted_and_cleared(own_cache: Path) -> None:
    for key in ("aa11", "ab22"):
        write_atomically(entry("cpu", key) / "kernel.o", b"x" * 100)
    found = run_json("cache", "info")
    assert (found["folder"], found["kernels"], found["bytes"]) == (str(own_cache), 2, 200)
    assert found["backends"] == {"cpu": {"kernels": 2, "bytes": 200}}
    assert "2 kernels, 0.0 MB" in run("cache", "info")
    assert run_json("cache", "clear")["cleared"] == 2
    assert run_json("cache", "info")["kernels"] == 0


def test_an_empty_cache_is_no_error(own_cache: Path) -> None:
    assert run("cache", "info") == f"{own_cache}: 0 kernels, 0.0 MB\n"
    assert run("cache", "clear") == f"{own_cache}: 0 kernels thrown away\n"
