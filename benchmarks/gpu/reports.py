"""A plugin of pytest that tells another process of each test as soon as it is over: a line of JSON for each.

The file descriptor of that process's pipe is in the environment. With pytest-xdist the process that gathers all reports
tells, and its workers do not.
"""

from __future__ import annotations

import json
import os
from typing import Any

#: The name of the environment's entry.
PIPE = "RULEC_BENCH_REPORTS"


def pytest_configure(config: Any) -> None:
    """Has the process that gathers the reports tell them, where somebody listens."""
    if PIPE in os.environ and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Teller(int(os.environ[PIPE])))


class Teller:
    """Tells the reports to the pipe of a descriptor."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def pytest_runtest_logreport(self, report: Any) -> None:
        """A test that ran or was skipped; a failure before or after it."""
        if report.when == "call" or not report.passed:
            self._tell(report)

    def pytest_collectreport(self, report: Any) -> None:
        """A file that could not be read."""
        if report.failed:
            self._tell(report)

    def _tell(self, report: Any) -> None:
        line = {"test": report.nodeid, "outcome": report.outcome, "said": said(report)}
        os.write(self._descriptor, (json.dumps(line) + "\n").encode())


def said(report: Any) -> str:
    """The reason of a failure or a skip, in one line."""
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).partition("\n")[0]
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash is not None else _error(str(report.longrepr or ""))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0][:300] if lines else ""


def _error(text: str) -> str:
    """The last line of a traceback that pytest has marked as the error; the text where there is none."""
    marked = [line[1:] for line in text.splitlines() if line.startswith("E ")]
    return marked[-1] if marked else text
