"""`rulec bench`: the project's measurements, which lie in a checkout and are not installed."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import typer

from rulec.errors import RulecError

#: Everything after `rulec bench` is read by the measurements' own command.
PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def bench(context: typer.Context) -> None:
    """Measure speed and memory: ratios within this run. Needs a checkout of rulec."""
    root = checkout()
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    from benchmarks.command import app

    code = typer.main.get_command(app).main(context.args, prog_name="rulec bench", standalone_mode=False)
    if code:
        raise typer.Exit(code)


def checkout() -> Path:
    """The root of the checkout that this rulec runs from; RulecError where it was installed by itself."""
    root = Path(__file__).resolve().parents[2]
    if not os.path.isfile(root / "pyproject.toml") or not os.path.isfile(root / "benchmarks" / "command.py"):
        raise RulecError(
            f"rulec bench measures the project from a checkout, and {root} is none: clone rulec's repository and run "
            "`make bench` in it"
        )
    return root
