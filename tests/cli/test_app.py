"""The application as a whole: help, version, exit codes, what it imports, what a terminal sees."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

import rulec
from tests.cli.running import error, invoke, process, run

COMMANDS = (
    "list", "show", "check", "new", "trace", "diff", "bench", "race", "memory", "demo", "doctor", "schema", "cache",
)  # fmt: skip


def test_help_names_every_command_with_a_whole_sentence() -> None:
    shown = run("--help")
    for command in COMMANDS:
        line = next(line for line in shown.splitlines() if line.split()[:1] == [command])
        assert line.endswith("."), line
        assert not line.endswith("..."), line


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str) -> None:
    assert f"Usage: rulec {command}" in run(command, "--help")


def test_version() -> None:
    assert run("--version") == f"rulec {rulec.__version__}\n"


def test_python_m_rulec_runs_the_same_command() -> None:
    done = process("list")
    assert done.returncode == 0
    assert done.stdout == run("list")


def test_a_mistake_is_one_sentence_and_exit_code_2() -> None:
    done = process("show", "adamm")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: there is no rule 'adamm'; did you mean 'adam'?")
    assert len(done.stderr.splitlines()) == 1


def test_the_place_of_a_mistake_is_shown(tmp_path: Path) -> None:
    file = tmp_path / "wrong.yaml"
    file.write_text("name: Wrong\nstep: |\n  direction = gg\n")
    first, *excerpt = error("check", str(file)).splitlines()
    assert first.startswith(f"error: {file}:3:15: ")
    assert [line.strip() for line in excerpt] == ["direction = gg", "^^"]


def test_an_unknown_option_is_exit_code_2() -> None:
    assert invoke("list", "--nonsense").exit_code == 2


def test_a_defect_of_rulec_is_not_made_to_look_like_a_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    from rulec.errors import InternalError

    def broken(name: str, allow_url: bool) -> None:
        raise InternalError("an invariant")

    monkeypatch.setattr("rulec.language.library.load.load", broken)
    assert isinstance(invoke("show", "adam").exception, InternalError)


LIGHT = """
import sys
from rulec.cli import main
sys.argv = ["rulec", {argument!r}]
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
print("LOADED", *sorted({{name.partition(".")[0] for name in sys.modules}}))
"""


@pytest.mark.parametrize(
    ("argument", "absent"),
    [
        ("--help", {"numba", "sympy", "torch", "jax", "pydantic", "yaml", "rich", "matplotlib", "sklearn"}),
        ("list", {"numba", "sympy", "torch", "jax", "matplotlib", "sklearn", "mpmath"}),
    ],
)
def test_light_commands_import_nothing_heavy(argument: str, absent: set[str]) -> None:
    done = process(program=LIGHT.format(argument=argument))
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.rpartition("LOADED")[2].split())
    assert "rulec" in loaded
    assert sorted(absent & loaded) == []


def test_a_terminal_sees_colour_and_a_pipe_does_not() -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "rulec", "show", "sgd"]
    child = subprocess.Popen(command, stdout=theirs, env={**os.environ, "TERM": "xterm-256color"})
    os.close(theirs)
    seen = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        seen += part
    os.close(ours)
    assert child.wait() == 0
    assert b"\x1b[" in seen
    assert b"float32" in seen
    assert "\x1b[" not in run("show", "sgd")
