"""`rulec doctor`."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from rich.console import Console
from rich.progress import Progress

from tests.cli.running import run, run_json


def test_every_backend_is_ok_or_says_why_not() -> None:
    found = run_json("doctor")
    assert {"cpu", "numpy", "jax", "triton"} <= found["backends"].keys()
    assert found["backends"]["cpu"] is None
    assert all(reason is None or reason for reason in found["backends"].values())
    assert found["problems"] == []
    assert found["versions"]["numpy"]
    assert found["cores"] >= 1


def test_on_a_terminal_each_backend_is_named_while_it_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    from rulec.backend import registry
    from rulec.cli import doctor

    said: list[str] = []

    @contextmanager
    def terminal() -> Iterator[Progress]:
        with Progress(console=Console(file=io.StringIO(), force_terminal=True)) as shown:
            yield shown
            assert shown.finished
            said.append(shown.tasks[0].description)

    monkeypatch.setattr(doctor, "progress", terminal)
    monkeypatch.setattr(registry, "names", lambda: ["numpy"])
    assert doctor._backends() == {"numpy": None}
    assert said == ["trying numpy"]


def test_the_text_says_the_same() -> None:
    shown = run("doctor")
    assert any(line.split() == ["cpu", "ok"] for line in shown.splitlines())
    assert "numba " in shown
    assert "kernels" in shown


def test_a_backend_that_does_not_load_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    from rulec.backend import registry
    from rulec.errors import BackendUnavailable

    def unavailable(name: str) -> None:
        raise BackendUnavailable(f"backend {name!r} does not load: no library")

    monkeypatch.setattr(registry, "get", unavailable)
    found = run_json("doctor", code=1)
    assert "no library" in found["backends"]["cpu"]
    assert found["problems"] == ["no backend runs here: install numba for the cpu backend"]


def test_a_cache_that_cannot_be_made_is_a_problem(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RULEC_CACHE_DIR", str(tmp_path / "file" / "cache"))
    (problem,) = run_json("doctor", code=1)["problems"]
    assert "set RULEC_CACHE_DIR" in problem


def test_the_extra_of_a_command_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Brackets of a reason are no markup."""
    from rulec.cli import doctor

    reason = "mlx is not installed: pip install 'rulec[mlx]'"
    monkeypatch.setattr(doctor, "_backends", lambda: {"cpu": None, "mlx": reason})
    assert f"no: {reason}" in run("doctor")
