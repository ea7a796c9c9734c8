"""RULEC_DEBUG: 1 prints the backend and bucket of each call, 2 also time and bandwidth, 3 each pass of the compiler, 4
the source of each kernel."""

from __future__ import annotations

from rulec.environment import debug_level

#: The level asked for; 0 is quiet.
LEVEL = debug_level()
