"""The project's tests on a GPU, run by pytest as pieces of work: each test counts as soon as it is over."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from benchmarks.gpu import reports
from benchmarks.gpu.device import Bench
from benchmarks.gpu.part import TESTS, Checked, Finding, Part
from rulec.errors import RulecError
from rulec.tools.compare.measure import cores

ROOT = Path(__file__).parents[2]

#: Processes of pytest at most, and seconds for a test.
_PROCESSES, _TEST = 8, 60

#: The tests that repeat what the other parts check: all of a backend's contract, in minutes.
WHOLE = "it_is_a_backend"

#: What is tested -> its files, the greatest risk first.
FILES: Mapping[str, tuple[str, ...]] = {
    "products of Muon, captured steps and steps": (
        "tests/gpu/test_quintic.py", "tests/gpu/test_captured.py", "tests/gpu/test_steps.py",
    ),
    "codes and 16-bit weights": (
        "tests/backends/test_coded_gpu.py", "tests/backends/test_weights_gpu.py",
        "tests/backends/test_unbiased_states_gpu.py",
    ),
    "steps on the host and statistics": (
        "tests/torch/offload/test_gpu.py", "tests/gpu/test_statistics.py",
    ),
    "eager updates and launches": ("tests/gpu/test_eager.py", "tests/backends/test_triton_gpu.py"),
    "random numbers, noise and arrays": (
        "tests/gpu/test_draws.py", "tests/gpu/test_noise.py", "tests/gpu/test_segments.py", "tests/gpu/test_arrays.py",
        "tests/gpu/test_strategies.py", "tests/backends/test_cupy_gpu.py",
    ),
}  # fmt: skip


def part(name: str, seconds: float) -> Part:
    """The tests of a name in `FILES`."""
    return Part(f"tests of {name}", tests, (name,), seconds, 10.0)


def missing() -> str | None:
    """A note where pytest is not installed; None where it is."""
    return None if _has("pytest") else "pytest, to run tests on the GPU with, is not installed"


def tests(bench: Bench, name: str) -> Iterator[Finding]:
    """A `Checked` for each test, failed where it or what is around it fails; RulecError where pytest itself does."""
    reading, writing = os.pipe()
    with tempfile.TemporaryFile() as output:
        environment = {**os.environ, reports.PIPE: str(writing), "PYTHONUNBUFFERED": "1"}  # the fault is the last line
        process = subprocess.Popen(
            command(FILES[name]), cwd=ROOT, env=environment, pass_fds=[writing], stdin=subprocess.DEVNULL,
            stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip
        os.close(writing)
        with os.fdopen(reading) as lines:
            yield from (checked(name, json.loads(line)) for line in lines)
        if process.wait() not in (0, 1):  # 1: tests failed
            raise RulecError(f"pytest ended with {process.returncode}: {_last_line(output)}")


def command(files: Sequence[str]) -> list[str]:
    """The command line: in several processes, and with a limit for each test, where pytest's plugins are installed."""
    words = [
        sys.executable,
        "-m",
        "pytest",
        "-m",
        "gpu",
        "-p",
        reports.__name__,
        "-p",
        "no:cacheprovider",
        "--tb=short",
        "-k",
        f"not {WHOLE}",
    ]
    if _has("xdist"):
        words += ["-n", str(min(_PROCESSES, cores()))]
    if _has("pytest_timeout"):
        words += ["--timeout", str(_TEST)]
    return [*words, *files]


def checked(name: str, report: Mapping[str, Any]) -> Checked:
    """The finding of a report; a skipped test is refused, with its reason."""
    test, said = report["test"].rpartition("/")[2], report["said"] or "no message"
    fault, refused = (said if report["outcome"] == kind else None for kind in ("failed", "skipped"))
    return Checked(name, test, "", fault=fault, refused=refused, kind=TESTS)


def _last_line(output: IO[bytes]) -> str:
    output.seek(0)
    lines = output.read().decode(errors="replace").strip().splitlines()
    return lines[-1][:300] if lines else "it said nothing"


def _has(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
