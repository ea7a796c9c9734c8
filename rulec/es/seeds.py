"""Seeds of strategies that are given none: each has its own, and the same calls in the same order have the same."""

from __future__ import annotations

import threading

#: The first of these seeds: those that people write are smaller.
FIRST = 2**31

_lock = threading.Lock()
_used: set[int] = set()


def next_seed() -> int:
    """The least seed from `FIRST` on that no strategy of this process has had."""
    with _lock:
        seed = FIRST
        while seed in _used:
            seed += 1
        _used.add(seed)
        return seed


def use(seed: int) -> None:
    """Keeps `next_seed` from giving this one."""
    with _lock:
        _used.add(seed)
