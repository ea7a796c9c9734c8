"""The command line, one file per command.

The files of commands import nothing heavy: a command imports its needs when it runs.
"""

from __future__ import annotations


def main() -> None:
    """Runs the command line with the arguments of this process, and ends the process."""
    from rulec.cli.app import app

    app()
