"""A type checker in a process of its own: mypy raises the recursion limit of its process for good."""

from __future__ import annotations

import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

LINTED = Path(__file__).parents[1] / ".mypy_cache"


def checked(program: Path, *options: str) -> tuple[int, str]:
    """mypy's exit status for a file, and its output; the test is skipped without mypy."""
    pytest.importorskip("mypy")
    command = [sys.executable, "-m", "mypy", "--strict", f"--cache-dir={_cache(program)}", *options, str(program)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def _cache(program: Path) -> Path:
    """A folder beside the file for what mypy knows of libraries: a copy of what `make lint` left, where it did."""
    folder = program.parent / "mypy"
    if LINTED.is_dir() and not folder.exists():
        with suppress(shutil.Error):  # where mypy writes it just now, a part will do
            shutil.copytree(LINTED, folder)
    return folder
