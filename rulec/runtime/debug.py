"""RULEC_DEBUG: 1 names each call's backend and bucket, 2 adds its time and bandwidth, 3 prints each pass as a rule is
compiled, 4 the source of each kernel."""

from __future__ import annotations

import os

#: The level asked for; 0 is quiet.
LEVEL = int(os.environ.get("RULEC_DEBUG") or 0)
