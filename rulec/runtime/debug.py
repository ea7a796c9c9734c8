"""RULEC_DEBUG: 1 prints the backend and bucket of each call, 2 also time and bandwidth, 3 each pass of the compiler, 4
the source of each kernel."""

from __future__ import annotations

import os

#: The level asked for; 0 is quiet.
LEVEL = int(os.environ.get("RULEC_DEBUG") or 0)
