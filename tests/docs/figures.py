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

#: The rows of README.md's table: one that torch fuses, one that it does not, and a model's tensors on a GPU.
HEADLINES = (
    "adamw, torch.optim.AdamW(fused=True): kernel, times as fast as torch's fused step",
    "nadam, torch.optim.NAdam(foreach=True): kernel, times as fast as torch's foreach step",
    "adamw, the tensors of GPT-2 XL: step, times as fast as torch's fused step",
)
_MORE = "[Benchmarks](docs/benchmarks.md) has every figure, those that are missed first."


def benchmarks(folder: Path = FOLDER) -> str:
    """The headlines among the results in a folder, and how many targets are met: on the CPU, and on a GPU."""
    results = [page.read(folder / f"{name}.json") for name in MEASUREMENTS if (folder / f"{name}.json").is_file()]
    if not results:
        return "No results are recorded yet: the command records them."
    headlines = [
        [row.what, page.figure(row), _device(result)]
        for result in results for row in result.rows if row.what in HEADLINES
    ]  # fmt: skip
    machines = [[r for r in results if (r.name == "gpu") is on_gpu] for on_gpu in (False, True)]
    met = " and ".join(_met(measured) for measured in machines if measured)
    closing = (
        f"Of the targets that the project set itself, {met} are met. [Benchmarks](docs/benchmarks.md) has every figure."
    )
    return "\n\n".join([table(["figure", "measured", "on"], headlines), closing])


def _device(result: Result) -> str:
    gpu = result.machine.get("gpu", {}).get("name")
    return gpu or f"{result.machine['cpu']}, {result.threads} threads"


def _met(results: Sequence[Result]) -> str:
    judged = [row for result in results for row in result.rows if row.target is not None]
    where = "on a GPU" if results[0].name == "gpu" else "on a CPU"
    return f"{sum(row.met is True for row in judged)} of {len(judged)} {where}"
