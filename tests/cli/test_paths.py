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


def test_messages_have_a_path_as_it_was_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also that of a rule named in a file; names in a linked file are of the folder where the file lies."""
    (tmp_path / "work").mkdir()
    (tmp_path / "rules").mkdir()
    (tmp_path / "rules" / "wrong.yaml").write_text("name: Wrong\nstep: |\n  direction = gg\n")
    (tmp_path / "rules" / "both.yaml").write_text("name: Both\nplus: [wrong.yaml, decay]\n")
    (tmp_path / "work" / "link.yaml").symlink_to("../rules/both.yaml")
    monkeypatch.chdir(tmp_path / "work")
    for command in (("check",), ("race", "--task", "valley"), ("show",)):
        for file in ("wrong.yaml", "both.yaml"):
            shown = error(*command, f"../rules/{file}").splitlines()[0]
            assert shown == "error: ../rules/wrong.yaml:3:15: unknown name 'gg'; did you mean 'g'?"
    assert "wrong.yaml:3:15: unknown name 'gg'" in error("check", "link.yaml")


def test_a_python_file_that_fails_is_a_sentence_with_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("fails.py").write_text("import rulec\n\nrulec.nothing\n")
    Path("wrong.py").write_text("import rulec\ndef f(:\n")
    expected = "error: fails.py:3: AttributeError: module 'rulec' has no attribute 'nothing'\n"
    assert error("play", "fails.py", "--no-browser") == error("check", "fails.py:rule") == expected
    assert error("check", "wrong.py").startswith("error: wrong.py:2: SyntaxError: ")


def test_nothing_asks_of_a_path_by_what_may_raise() -> None:
    """Questions of pathlib's raise where the system refuses to answer; those of os.path do not."""
    for file in sorted((ROOT / "rulec").rglob("*.py")):
        assert re.search(r"\.(exists|is_file|is_dir)\(\)", file.read_text()) is None, f"{file}: use os.path"
