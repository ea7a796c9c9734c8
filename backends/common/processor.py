"""The processor of this machine, as far as compilers' options depend on it."""

from __future__ import annotations

import functools
import platform


@functools.cache
def is_x86() -> bool:
    """Whether the processor is of the family x86, whose assembly has two syntaxes."""
    return platform.machine().lower() in ("x86_64", "amd64", "i386", "i686")
