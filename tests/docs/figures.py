"""The figures of README.md, from what `rulec bench` last wrote."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks import page
from benchmarks.result import Result
from benchmarks.suite import MEASUREMENTS
from tests.docs.markdown import ROOT
from tests.docs.table import table

FOLDER = ROOT / "docs" / "benchmarks"

#: The rows of README.md's table, by how their text begins.
HEADLINES = (
    "adamw, ", "lion, float32", "nadam, ", "1000 tensors", "300 tensors", "148 tensors", "1 tensors", "500 groups",
    "import",
)  # fmt: skip


def benchmarks(folder: Path = FOLDER) -> str:
    """Some rows of the results in a folder, and every target that was missed: on the CPU, and on a GPU."""
    results = [page.read(folder / f"{name}.json") for name in MEASUREMENTS if (folder / f"{name}.json").is_file()]
    if not results:
        return "No results are recorded yet: the command records them."
    there = [[r for r in results if (r.name == "gpu") is on_gpu] for on_gpu in (False, True)]
    parts = [text for found in there if found for text in _machine(found)]
    return "\n\n".join([*parts, "Every figure: [benchmarks](docs/benchmarks.md)."])


def _machine(results: Sequence[Result]) -> list[str]:
    """What was measured on one machine."""
    every = [row for result in results for row in result.rows]
    judged, missed = [r for r in every if r.target is not None], [r for r in every if r.met is False]
    first = results[0]
    device = first.machine.get("gpu", {}).get("name") or f"{first.machine['cpu']}, {first.threads} threads"
    met = f"{len(judged) - len(missed)} of {len(judged)} targets are met{', missed are:' if missed else '.'}"
    parts = [f"Measured on {first.measured}, {device}. {met}"]
    if missed:
        parts.append("\n".join(f"- {r.what}: {page.figure(r)}, wanted {page.target(r)}" for r in missed))
    chosen = [[r.what, page.figure(r), page.target(r)] for r in every if r.what.startswith(HEADLINES)]
    return [*parts, table(["figure", "measured", "target"], chosen)]
