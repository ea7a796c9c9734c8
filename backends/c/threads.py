"""How many threads run a stage: OpenMP's have to be woken, all of them waited for, and do not survive a fork."""

from __future__ import annotations

import os

from ..cpu import threads as cpu_threads

#: Below this many spans of work, a second thread costs more than it saves.
FEW_SPANS = 8

_FORKED: list[int] = []


def threads(spans: int) -> int:
    """The threads for so many spans of work."""
    return most() if spans >= FEW_SPANS else 1


def most() -> int:
    """As many as RULEC_NUM_THREADS asks for, else the processors of this process; one in a forked child.

    GNU's OpenMP would wait there for threads that only the parent has.
    """
    return 1 if _FORKED else cpu_threads.thread_count()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: _FORKED.append(os.getpid()))
