"""The figures of README.md, from what `rulec bench` last wrote."""

from __future__ import annotations

from pathlib import Path

from benchmarks import page
from benchmarks.result import Result, Row
from benchmarks.suite import MEASUREMENTS
from tests.docs.markdown import ROOT
from tests.docs.table import table

FOLDER = ROOT / "docs" / "benchmarks"

#: The rows of README.md's table: one that torch fuses, one that it does not, and models' tensors on a GPU.
HEADLINES = (
    "adamw, torch.optim.AdamW(fused=True): kernel, times as fast as torch's fused step",
    "nadam, torch.optim.NAdam(foreach=True): kernel, times as fast as torch's foreach step",
    "adamw, the tensors of GPT-2 XL: step, times as fast as torch's fused step",
    "muon, the 192 matrices of GPT-2 XL: step, times as fast as torch.optim.Muon",
    "adafactor, 146 tensors as of Llama 3.2 1B: step from idle to idle, times as fast as torch's foreach Adafactor",
    "adamw, states in dynamic8: step, times as fast as bitsandbytes' AdamW8bit",
)
_MORE = "[Benchmarks](docs/benchmarks.md) has every figure."


def benchmarks(folder: Path = FOLDER) -> str:
    """The headlines among the results in a folder."""
    results = [page.read(folder / f"{name}.json") for name in MEASUREMENTS if (folder / f"{name}.json").is_file()]
    if not results:
        return "No results are recorded yet: the command records them."
    headlines = [
        [row.what, page.figure(row), _device(result, row)]
        for result in results for row in result.rows if row.what in HEADLINES
    ]  # fmt: skip
    return "\n\n".join([table(["figure", "measured", "on"], headlines), _MORE])


def _device(result: Result, row: Row) -> str:
    """The GPU and the day of a row's run, or the processor."""
    of = result.parts.get(row.part, result)
    gpu = of.machine.get("gpu", {}).get("name")
    return f"{gpu}, {of.measured}" if gpu else f"{of.machine['cpu']}, {result.threads} threads"
