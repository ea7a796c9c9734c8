"""The table of docs/race.md, from what `rulec bench race` last wrote."""

from __future__ import annotations

from benchmarks import page
from benchmarks.race import MEASURE, RULES
from tests.docs.es_tables import Rows, maker
from tests.docs.markdown import ROOT
from tests.docs.table import table


def batches(rows: Rows) -> str:
    """How much longer separate runs take, by task and rule."""
    tasks = dict.fromkeys(subject.partition(" on ")[2] for subject, _ in rows)
    body = [[task, *(page.figure(rows[f"{rule} on {task}", MEASURE]) for rule in RULES)] for task in tasks]
    return table([f"task: {MEASURE}", *RULES], body)


MAKERS = {"race": maker(batches, ROOT / "docs" / "benchmarks" / "race.json")}
