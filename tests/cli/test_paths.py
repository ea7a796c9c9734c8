"""Paths that no disk takes, wherever a user can give one: a sentence, and no bare OSError."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

import rulec
import rulec.torch
from rulec.errors import RulecError
from tests.cli.running import error, invoke
from tests.test_layering import ROOT

LONG = "x" * 300

COMMANDS = [
    ("check", LONG), ("check", f"{LONG}.yaml"), ("check", f"/tmp/{LONG}/mine.yaml"), ("check", f"{LONG}.py:rule"),
    ("show", f"{LONG}.yaml"), ("trace", f"{LONG}.yaml"), ("diff", f"{LONG}.yaml", "--against", "adamw"),
    ("build", "sgd", "--backend", "c", "-o", f"/tmp/{LONG}"),
    ("build", "sgd", "--backend", "c", "-o", f"/tmp/{LONG}/a"),
    ("new", LONG), ("new", "mine", "--folder", f"/tmp/{LONG}"), ("new", "mine", "--package", LONG),
    ("new", "mine", "--package", "rulec-mine", "--folder", f"/tmp/{LONG}"), ("memory", "--model", f"/tmp/{LONG}"),
    ("race", "sgd", "--csv", f"/tmp/{LONG}"),
]  # fmt: skip


@pytest.mark.parametrize("arguments", COMMANDS, ids=lambda arguments: " ".join(arguments)[:24])
def test_a_command_says_what_is_wrong_with_a_long_path(arguments: tuple[str, ...]) -> None:
    assert error(*arguments).startswith("error: ")


@pytest.mark.parametrize("command", [("cache", "clear"), ("cache", "info"), ("doctor",)])
def test_a_long_path_of_the_cache(command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RULEC_CACHE_DIR", f"/tmp/{LONG}")
    result = invoke(*command)
    assert result.exception is None or isinstance(result.exception, SystemExit)


@pytest.mark.parametrize("name", [f"{LONG}.yaml", LONG, Path(f"{LONG}.yaml"), Path(LONG), f"{LONG}.py", "a\0b.yaml"])
@pytest.mark.parametrize("load", [rulec.load, rulec.torch.optimizer])
def test_a_rule_of_a_long_path(load: Callable[[object], object], name: str | Path) -> None:
    with pytest.raises(RulecError, match=r"there is no |cannot be read: "):
        load(name)


def test_nothing_asks_of_a_path_by_what_may_raise() -> None:
    """Questions of pathlib's raise where the system refuses to answer; those of os.path do not."""
    for file in sorted((ROOT / "rulec").rglob("*.py")):
        assert re.search(r"\.(exists|is_file|is_dir)\(\)", file.read_text()) is None, f"{file}: use os.path"
