"""A type checker in a process of its own: mypy raises the recursion limit of its process for good."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


def checked(program: Path, *options: str) -> tuple[int, str]:
    """mypy's exit status for a file, and its output; the test is skipped without mypy."""
    pytest.importorskip("mypy")
    command = [sys.executable, "-m", "mypy", "--strict", f"--cache-dir={program.parent}", *options, str(program)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr
