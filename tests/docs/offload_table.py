"""The figures of docs/offload.md, from what `rulec bench offload` last wrote."""

from __future__ import annotations

import json

from tests.docs.markdown import ROOT
from tests.docs.table import table

RESULTS = ROOT / "docs" / "benchmarks" / "offload.json"


def host() -> str:
    """The rows of the host's step: what is measured, on which tensors, and the figure."""
    rows = json.loads(RESULTS.read_text())["rows"]
    cells = [(row["subject"], row["measure"].removeprefix("host step, "), f"{row['value']:.2f}") for row in rows]
    return table(("rule, tensors", "the host's step", ""), cells)


MAKERS = {"offload-host": host}
