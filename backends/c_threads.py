"""How many threads may run a stage: OpenMP's do not survive a fork."""

from __future__ import annotations

import os

from . import cpu_threads

_FORKED: list[int] = []


def most() -> int:
    """As many as RULEC_NUM_THREADS asks for, else the processors of this process; one in a forked child.

    GNU's OpenMP would wait there for threads that only the parent has.
    """
    return 1 if _FORKED else cpu_threads.thread_count()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: _FORKED.append(os.getpid()))
