"""Python's grammar."""

from __future__ import annotations

import ast
from threading import Lock
from typing import Any

#: Python 3.11 raises SystemError where two threads make trees at once and the collector of garbage calls back.
_LOCK = Lock()


def syntax_tree(text: str, mode: str = "exec") -> Any:
    """The tree of a Python text, by `ast.parse` and with its errors."""
    with _LOCK:
        return ast.parse(text, mode=mode)
