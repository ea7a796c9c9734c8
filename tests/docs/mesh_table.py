"""The table of docs/several-gpus.md, from what `rulec bench mesh` last wrote."""

from __future__ import annotations

from benchmarks import page
from benchmarks.mesh import BETWEEN, KEPT, MATRICES, MODEL, TIME, WORK
from tests.docs.es_tables import Rows, maker
from tests.docs.markdown import ROOT
from tests.docs.table import table

_HEADS = {
    TIME: "Muon's products, the busiest GPU", WORK: "its work, of the mean", MATRICES: "it sends of matrices",
    BETWEEN: "and to other owners of one", MODEL: "a GPU sends of weights and gradients", KEPT: "and keeps",
}  # fmt: skip


def costs(rows: Rows) -> str:
    """What a step costs, mesh by mesh."""
    subjects = dict.fromkeys(subject for subject, _ in rows)
    body = [[subject, *(page.figure(rows[subject, measure]) for measure in _HEADS)] for subject in subjects]
    return table(["", *_HEADS.values()], body)


MAKERS = {"mesh-costs": maker(costs, ROOT / "docs" / "benchmarks" / "mesh.json")}
