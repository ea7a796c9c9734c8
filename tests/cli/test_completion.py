"""What a shell offers."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from rulec.cli.app import app
from rulec.cli.arguments import backend_words, rule_words


def test_rules_backends_and_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("lion_mine.yaml", "lion.txt", "lions/a.py", ".hidden/b.yaml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    assert rule_words("lion") == ["lion", "lion_k", "lion_mine.yaml", "lions/"]
    assert rule_words("lions/") == ["lions/a.py"]
    assert rule_words(f"{tmp_path}/lion_") == [f"{tmp_path}/lion_mine.yaml"]
    assert ".hidden/" not in rule_words("")
    assert {"lookahead", "transforms/lookahead"} <= {*rule_words("")}
    assert backend_words("c") == ["c", "cpu", "cupy"]


def test_the_shell_is_answered() -> None:
    asked = {"_RULEC_COMPLETE": "complete_bash", "COMP_WORDS": "rulec play adamw", "COMP_CWORD": "2"}
    assert "adamw" in CliRunner().invoke(app, [], env=asked).stdout.split()
