"""`rulec play`: the rule that it opens, its port, and its mistakes; tests/play has the page."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rulec import extras
from rulec.cli.play import listen, opening_of
from tests.cli.running import error


def test_the_text_of_a_rule(tmp_path: Path) -> None:
    assert opening_of("").text.startswith("name: WaryAdam")
    assert opening_of("adamw").text.startswith("name: AdamW")
    assert opening_of("clip_by_value >> adam").text.startswith("name: ")
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("name: [")
    opening = opening_of(str(wrong))
    assert (opening.text, opening.file, opening.folder) == ("name: [", "wrong.yaml", tmp_path)


def test_a_port_that_is_taken() -> None:
    with listen(0) as taken:
        port = taken.getsockname()[1]
        assert taken.getsockname()[0] == "127.0.0.1"
        assert f"port {port} is taken: name another one" in error("play", "--no-browser", "--port", str(port))


@pytest.mark.parametrize(
    ("rule", "sentence"),
    [("adamm", "there is no rule 'adamm'; did you mean 'adam'?"), ("none.yaml", "there is no rule file 'none.yaml'")],
)
def test_a_rule_that_is_none(rule: str, sentence: str) -> None:
    message = error("play", rule, "--no-browser", "--port", "0")
    assert sentence in message
    assert len(message.splitlines()) == 1


def test_files_that_are_no_text(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_bytes(b"name: \xff")
    assert f"{file} cannot be read: it is not UTF-8" in error("play", str(file), "--no-browser")
    file.write_text("#" * 100_001)
    assert f"{file} has 100001 characters, over the limit of 100000" in error("play", str(file), "--no-browser")


def test_without_starlette_the_remedy_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "rulec.tools.playground.server", raising=False)
    monkeypatch.setitem(sys.modules, "starlette.applications", None)
    assert error("play") == f"error: rulec play needs starlette, which is not installed: {extras.command('play')}\n"
