"""The number of threads for a stage: OpenMP wakes them, waits for all of them, and loses them in a fork."""

from __future__ import annotations

import os

from ..common import threads as cpu_threads

#: With fewer spans of work than this, a second thread costs more than it saves.
FEW_SPANS = 8

_FORKED: list[int] = []


def threads(spans: int) -> int:
    """The number of threads for this many spans of work."""
    return most() if spans >= FEW_SPANS else 1


def most() -> int:
    """RULEC_NUM_THREADS, else the number of this process's processors; one in a forked child.

    In a child, GNU's OpenMP would wait for threads that exist only in the parent.
    """
    return 1 if _FORKED else cpu_threads.thread_count()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: _FORKED.append(os.getpid()))
