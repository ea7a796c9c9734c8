"""Environment variables with what nobody expects in them: a sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

import rulec
from rulec.environment import debug_level
from rulec.errors import BackendUnavailable, RulecError
from rulec_backends.c import compile as c_compiler
from rulec_backends.common import threads
from tests.cli.running import error

NO_NUMBERS = ["true", "'", "-1", "1.5", "1_0", "0x2", "\u00b2", "\u0663", "1e3", "9" * 20]


@pytest.mark.parametrize("text", [*NO_NUMBERS, "5"])
def test_a_level_of_debugging_that_is_no_number(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RULEC_DEBUG", text)
    with pytest.raises(RulecError, match=r"^RULEC_DEBUG is .*: set it to a number from 0 to 4, or unset it$"):
        debug_level()
    with pytest.raises(RulecError, match=r"^RULEC_DEBUG is "):
        rulec.compile(rulec.parse(f"name: A\nstep: p = p - {0.125 + len(text)}*g\n"))
    assert error("check", "sgd", "--backend", "numpy", "--steps", "1").startswith("error: RULEC_DEBUG is ")


@pytest.mark.parametrize("text", [*NO_NUMBERS, "4097"])
def test_a_number_of_threads_that_is_none(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RULEC_NUM_THREADS", text)
    with pytest.raises(RulecError, match=r"^RULEC_NUM_THREADS is .*: set it to a number of threads, 4096 at most, or"):
        threads.asked_for.__wrapped__()


@pytest.mark.parametrize(("text", "number"), [("", 0), ("0", 0), (" 3 ", 3), ("4096", 4096)])
def test_a_number_of_threads(text: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RULEC_NUM_THREADS", text)
    assert threads.asked_for.__wrapped__() == number


@pytest.mark.parametrize("command", ["'", '"', "cc 'x", "''", "\\", "/", "no-such-compiler", "x" * 400])
def test_a_compiler_that_is_no_command(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", command)
    message = c_compiler.missing()
    assert message is not None
    assert message.endswith(" is not on the path: set CC to one that is, or unset it")
    with pytest.raises(BackendUnavailable, match=r"^backend 'c' cannot run here: the C compiler CC="):
        c_compiler._compiled(Path("a.c"), "int a;")


@pytest.mark.parametrize(("command", "said"), [("true", "it makes no file"), ("false", "it says nothing")])
def test_a_command_that_is_no_compiler(command: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", command)
    with pytest.raises(BackendUnavailable, match=rf"{command} fails on a\.c \({said}\): set CC to a compiler of C99"):
        c_compiler._compiled(Path("a.c"), "int a;")
