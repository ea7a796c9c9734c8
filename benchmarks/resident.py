"""The peak memory of this process, as the system counts it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def peak_growth(work: Callable[[], object]) -> int:
    """The bytes by which the peak of resident memory during `work` exceeds the resident memory before it.

    OSError where the system does not count them.
    """
    _RESET.write_text("5", encoding="ascii")  # forgets the peak so far
    before = _kilobytes("VmRSS")
    work()
    return max(0, _kilobytes("VmHWM") - before) * 1024


def _kilobytes(field: str) -> int:
    match = re.search(rf"^{field}:\s*(\d+) kB", _STATUS.read_text(encoding="ascii"), re.MULTILINE)
    if match is None:
        raise OSError(0, f"{_STATUS} has no {field}")
    return int(match[1])
