"""Processes in which Triton is its own interpreter, or is not: that is decided before it is imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

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
    """What a Python program prints as JSON in its last line."""
    kept = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", program], env={**kept, **environment}, cwd=ROOT, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def in_the_interpreter(program: str, result: str = "None") -> Any:
    """The same in Triton's interpreter: what `result` is once the lines of `program` have run."""
    return in_a_process(f"{HEAD}{program}\nprint(json.dumps({result}))\n", TRITON_INTERPRET="1")
