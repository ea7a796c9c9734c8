"""Processes: what parts say comes back in order, and one that fails or dies leaves the others and its place alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.gpu.crew import Processes, serve
from benchmarks.gpu.device import Bench
from benchmarks.gpu.part import Findings, Note, Part, Section, sentence
from benchmarks.gpu.run import Ended, Run, Started
from rulec.errors import RulecError
from tests.benchmarks.gpu_fakes import HostDevice


def says(bench: Bench, text: str) -> Iterator[Note]:
    yield Note(text)


def fails(bench: Bench) -> Iterator[Note]:
    yield Note("before it fails")
    raise ValueError("it fails\nand says more")


def dies(bench: Bench) -> Iterator[Note]:
    yield Note("before it dies")
    os.kill(os.getpid(), signal.SIGKILL)


def hangs(bench: Bench) -> Iterator[Note]:
    yield Note("before it hangs")
    time.sleep(3600)


def spoils(bench: Bench) -> Iterator[Note]:
    """As an illegal access does: nothing works in this process any longer."""
    yield Note(f"spoilt {os.getpid()}")
    bench.device.broken = True  # type: ignore[attr-defined]
    bench.device.synchronize()


def tells_its_process(bench: Bench) -> Iterator[Note]:
    yield Note(f"from {os.getpid()}")


@pytest.mark.slow
def test_what_goes_wrong_in_a_process_is_that_parts_alone() -> None:
    parts = [
        Part("one", says, ("hello",)), Part("two", fails), Part("three", dies), Part("four", hangs, (), 1.0),
        Part("five", says, ("still here",)),
    ]  # fmt: skip
    crew, findings = Processes(1, Bench(True, HostDevice())), Findings()
    try:
        Run(crew, 300.0, time.monotonic, lambda: None).section(Section("s", parts, 300.0), findings)
    finally:
        crew.close()
    assert findings.notes == [
        "hello", "before it fails", "two: failed: ValueError: it fails",
        "before it dies", "three: failed: its process was ended by signal 9",
        "before it hangs", "four: failed: it was not done when its time was over, and was ended",
        "still here",
    ]  # fmt: skip


def begins_another(bench: Bench) -> Iterator[Note]:
    """As tests in processes of their own do."""
    yield Note(str(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"]).pid))
    time.sleep(3600)


@pytest.mark.slow
def test_what_a_process_has_begun_is_ended_with_it() -> None:
    crew, findings = Processes(1, Bench(True, HostDevice())), Findings()
    try:
        Run(crew, 300.0, time.monotonic, lambda: None).section(
            Section("s", [Part("a", begins_another, (), 1.0)], 300.0), findings
        )
    finally:
        crew.close()
    pid = findings.notes[0]
    state = Path(f"/proc/{pid}/stat")
    for _ in range(100):  # until whoever adopts it has seen its end
        if not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.05)
    pytest.fail(f"process {pid} goes on")


@pytest.mark.slow
def test_a_process_whose_device_is_spoilt_is_not_used_again() -> None:
    parts = [Part("a", tells_its_process), Part("b", spoils), Part("c", tells_its_process)]
    crew, findings = Processes(1, Bench(True, HostDevice())), Findings()
    try:
        Run(crew, 300.0, time.monotonic, lambda: None).section(Section("s", parts, 300.0), findings)
    finally:
        crew.close()
    first, spoilt, failed, after = findings.notes
    assert first.split()[1] == spoilt.split()[1] != after.split()[1]
    assert failed == "b: failed: RuntimeError: CUDA error: an illegal memory access was encountered"


class Line:
    """A connection in this process: what comes and what was sent."""

    def __init__(self, *coming: object) -> None:
        self.coming, self.sent = list(coming), list[object]()

    def recv(self) -> object:
        if not self.coming:
            raise EOFError
        return self.coming.pop(0)

    def send(self, message: object) -> None:
        self.sent.append(message)


def test_a_process_starts_when_the_device_is_ready_and_ends_when_there_is_nobody() -> None:
    line = Line(Part("a", says, ("hello",)))
    serve(line, Bench(True, HostDevice()))  # type: ignore[arg-type]
    assert line.sent == [Started(), Note("hello"), Ended()]


def test_a_device_that_cannot_be_had_is_the_parts_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_device(self: Bench) -> None:
        raise RuntimeError("no CUDA-capable device is detected")

    monkeypatch.setattr(Bench, "prepare", no_device)
    line = Line(Part("a", says, ("hello",)), None, Part("b", says, ("never",)))
    serve(line, Bench(True))  # type: ignore[arg-type]
    assert line.sent == [Ended("RuntimeError: no CUDA-capable device is detected")]


def test_errors_are_one_line() -> None:
    assert sentence(RulecError("ours\nwith a place")) == "ours"
    assert sentence(KeyError()) == "KeyError: no message"
    assert sentence(ValueError("x" * 1000)) == f"ValueError: {'x' * 400}"
