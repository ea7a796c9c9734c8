"""Runs commands as tests need them: in this process, and in one of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

from rulec.cli.app import app


def run(*arguments: str, code: int = 0) -> str:
    """What a command prints on stdout; it must end with this exit code."""
    result = invoke(*arguments)
    assert result.exit_code == code, (result.exit_code, result.output, result.exception)
    return result.stdout


def run_json(*arguments: str, code: int = 0) -> Any:
    """What a command prints with --json."""
    return json.loads(run(*arguments, "--json", code=code))


def error(*arguments: str) -> str:
    """The message of a command that was asked for something wrong: exit code 2, nothing on stdout, no traceback."""
    result = invoke(*arguments)
    assert result.exit_code == 2, (result.exit_code, result.output, result.exception)
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    return result.stderr


def invoke(*arguments: str) -> Result:
    """The outcome of a command in this process."""
    return CliRunner().invoke(app, list(arguments))


def process(*arguments: str, program: str = "", folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    """`python -m rulec ...`, or a Python program, in a process of its own."""
    command = [sys.executable, "-c", program] if program else [sys.executable, "-m", "rulec", *arguments]
    return subprocess.run(
        command, cwd=folder, env=dict(os.environ), stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
