"""Work counted, where a clock would depend on who else is busy."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

#: Calls of Python functions that reading a text may take. One with 5,000 hyper-parameters takes 1.3 million.
MOST_CALLS = 5_000_000


@contextmanager
def counted(most: int = MOST_CALLS) -> Iterator[list[int]]:
    """Counts the calls of Python functions in a block, as the one item of a list; AssertionError beyond the most."""
    calls = [0]

    def count(frame: FrameType, event: str, argument: Any) -> None:
        calls[0] += event == "call"

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        yield calls
    finally:
        sys.setprofile(before)
    assert calls[0] <= most, f"{calls[0]} calls, where at most {most} were expected"
