"""Processes in which Triton is its own interpreter, or is not: that is decided before it is imported.

One process of each kind imports what takes seconds to import; every program runs in a fork of it, alone.
"""

from __future__ import annotations

import functools
import json
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent

#: What a program in the interpreter begins with: `subject` is the backend as the conformance suite has it.
HEAD = """
import json
import rulec
from rulec.testing import conformance
from rulec.testing.cases import *
from rulec.testing.conformance import *
subject = conformance._subject("triton", None, None)
"""


def in_a_process(program: str, **environment: str) -> Any:
    """What a Python program prints as JSON in its last line; a test of the interpreter is skipped where it fails."""
    if environment.get("TRITON_INTERPRET") == "1":
        require_interpreter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "program.py").write_text(program)
        status = _parent(**environment).run(folder)
        assert status == 0, (folder / "stderr").read_text()[-3000:]
        return json.loads((folder / "stdout").read_text().splitlines()[-1])


def check_in_interpreter(program: str, result: str = "None") -> Any:
    """The same in Triton's interpreter: what `result` is once the lines of `program` have run."""
    return in_a_process(f"{HEAD}{program}\nprint(json.dumps({result}))\n", TRITON_INTERPRET="1")


def require_interpreter() -> None:
    """Skips a test that runs kernels in Triton's interpreter, where that interpreter fails."""
    fault = interpreter_fault(version("triton"), version("numpy"))
    if fault:
        pytest.skip(fault)


def interpreter_fault(triton: str, numpy: str) -> str:
    """A sentence where the interpreter of this Triton fails beside this NumPy; empty where it works.

    Before 3.7 it makes the bounds of loops numbers by `int` of arrays with one element, an error of NumPy from 2.4 on.
    """
    if _release(triton) >= (3, 7) or _release(numpy) < (2, 4):
        return ""
    return f"the interpreter of Triton {triton} fails with NumPy {numpy}: it needs Triton 3.7, or NumPy below 2.4"


def _release(text: str) -> tuple[int, ...]:
    """The first two numbers of a version."""
    return tuple(int(number) for number in text.split(".")[:2])


class Parent:
    """A process that forks for each program; it ends when this one does."""

    def __init__(self, environment: dict[str, str]) -> None:
        kept = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__], env={**kept, **environment}, cwd=ROOT, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def run(self, folder: Path) -> int:
        """The exit code of the program in a folder, which gets its output."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(folder, file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        assert answer, f"the process that runs programs has ended: {self._process.wait()}"
        return int(answer)


@functools.cache
def _parent(**environment: str) -> Parent:
    return Parent(environment)


def serve() -> None:
    """Runs the programs whose folders come line by line."""
    import torch  # noqa: F401
    import triton  # noqa: F401

    from rulec.testing import conformance  # noqa: F401

    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            _run(Path(line.strip()))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def _run(folder: Path) -> None:
    """Runs a program in this process and ends it."""
    for number, source in ((0, Path(os.devnull)), (1, folder / "stdout"), (2, folder / "stderr")):
        os.dup2(os.open(source, os.O_RDWR | os.O_CREAT), number)
    status = 1
    try:
        runpy.run_path(str(folder / "program.py"), run_name="__main__")
        status = 0
    except BaseException:  # noqa: BLE001 - the parent's exit is not this process's
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    serve()
