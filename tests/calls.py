"""Calls seen in a call, for tests that count work where a clock would depend on who else is busy."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def profiled(call: Callable[[], object], note: Callable[[FrameType, str, Any], object]) -> None:
    """Calls; `note` gets each event of Python's profiler: a frame, `"call"`, `"c_call"` or its end, an argument.

    The last event is that of the profiler's own end. Nothing is collected meanwhile: what ends with a collection makes
    calls that belong to no step.
    """
    collects = gc.isenabled()
    gc.disable()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
        if collects:
            gc.enable()
