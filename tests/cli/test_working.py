"""The line that says what a command is doing, on a clock of the test."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rulec.cli.working import Working, shapes_text, working
from tests.cli.running import run


class Clock:
    """A clock that stands still until the test sets it."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("live", "written"),
    [
        (False, "2 of 3: adam, step 2 of 8\n2 of 3: compiling kernel 1, adam by cpu, for adam\n"),
        (
            True,
            "\r\x1b[2K2 of 3: adam, step 2 of 8\r\x1b[2K2 of 3: compiling kernel 1, adam by cpu, for adam\r\x1b[2K",
        ),
    ],
)
def test_a_line_is_written_after_a_second_and_where_it_changes(live: bool, written: str) -> None:
    out, clock = io.StringIO(), Clock()
    shown = Working(out, live, clock)
    shown.begin("adam", 8, 2, 3)
    shown.advance()
    clock.now = 1.0
    shown.tick()
    assert out.getvalue() == ""
    clock.now = 1.1
    shown.tick()
    shown.tick()
    with shown.compiling("cpu", "adam"):
        shown.tick()
    shown.close()
    assert out.getvalue() == written


def test_work_within_a_second_writes_nothing() -> None:
    out, clock = io.StringIO(), Clock()
    shown = Working(out, True, clock)
    shown.begin("adam", 8)
    shown.tick()
    shown.close()
    assert out.getvalue() == ""


def test_the_last_step_is_followed_by_no_other() -> None:
    shown = Working(io.StringIO(), False, Clock())
    shown.begin("adam", 1)
    assert shown.line() == "adam, step 1 of 1"
    shown.advance()
    assert shown.line() == "adam"


BESIDE = "own by cpu, for Own beside 50 digits"


@pytest.mark.parametrize(
    ("command", "rest", "expected"),
    [
        (
            "check",
            ("--steps", "1"),
            {
                f"1 of 2: compiling kernel 1, {BESIDE}, reference and cpu, float64, 4x6 and 5",
                f"2 of 2: compiling kernel 2, {BESIDE}, cpu, float32, 4x6 and 5",
            },
        ),
        (
            "diff",
            ("--against", "sgd", "--steps", "1", "--tolerance", "1e9"),
            {"compiling kernel 1, own by cpu, for Own beside sgd, cpu, float64, 4x6 and 5"},
        ),
        (
            "race",
            ("--task", "valley", "--steps", "1", "--rates", "2", "--seeds", "1"),
            {"compiling kernel 1, own by cpu, for racing own.yaml"},
        ),
    ],
)
def test_commands_say_what_they_compile(
    command: str, rest: tuple[str, ...], expected: set[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The rule is new to the process, and the folder of kernels is empty."""
    monkeypatch.setenv("RULEC_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    Path("own.yaml").write_text(f"name: Own\nhyper: {{lr: 0.1}}\nstep: |\n  p = p - lr*g*{ord(command[0])}\n")
    said: list[str] = []
    compiling = Working.compiling

    @contextmanager
    def noted(self: Working, backend: str, name: str) -> Iterator[None]:
        with compiling(self, backend, name):
            said.append(self.line())
            yield

    monkeypatch.setattr(Working, "compiling", noted)
    run(command, "own.yaml", *rest)
    assert set(said) == expected


def test_quiet_commands_say_nothing_whatever_the_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[threading.Thread] = []
    monkeypatch.setattr(threading.Thread, "start", started.append)
    monkeypatch.setenv("RULEC_QUIET", "1")
    with working() as shown:
        shown.begin("adam", 8)
    assert started == []
    assert capsys.readouterr().err == ""


def test_shapes() -> None:
    assert shapes_text([(4, 6), (5,), ()]) == "4x6 and 5 and a number"
