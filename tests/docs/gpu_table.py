"""The manual's table of what was measured on a GPU: rows of docs/benchmarks/gpu.json, with their targets and days."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import page
from benchmarks.result import Result, Row
from tests.docs.figures import FOLDER
from tests.docs.table import table

FUSED = "step, times as fast as torch's fused step"
FOREACH = "step from idle to idle, times as fast as torch's foreach Adafactor"
OF_COPY = "step, of the copy bandwidth"
OF_STAGES = "step, of the copy bandwidth for what its stages move"
OF_FLOATS = "step, times that with states in float32"
LLAMA = "146 tensors as of Llama 3.2 1B"
MUON = "muon, the 192 matrices of GPT-2 XL"
RULES = ("adafactor", "came", "sm3", "adamp")


@dataclass(frozen=True)
class Line:
    """A line of the table: its words, its rows by subject and measure, and the words behind the figures."""

    words: str
    rows: Sequence[tuple[str, str]]
    behind: str = ""


LINES = (
    Line(
        "AdamW against torch's fused step: one tensor of 100 Mi, GPT-2 XL, one tensor of `2**31 + 17`",
        [(f"adamw, {each}", FUSED) for each in (
            "one tensor of 100 Mi elements", "the tensors of GPT-2 XL", "one tensor of 2**31 + 17 elements")],
        "times as fast",
    ),
    Line("the same, 1000 tensors of 1000", [("adamw, 1000 tensors of 1000 elements", FUSED)], "times as fast"),
    Line(
        "the host's time of a step of 1, 300 and 1000 tensors",
        [("adamw, 1 tensor of 1000", "host time of a step"), ("adamw, 300 tensors of 1000", "host time of a step"),
         ("adamw, 1000 tensors of 1000", "host time of a step")],
    ),
    Line(
        "the host's time of a captured step of 1000 tensors",
        [("adamw, 1000 tensors of 1000, in a graph", "host time of a captured step")],
    ),
    Line(
        "146 tensors of a Llama, from idle to idle, against torch's foreach Adafactor: Adafactor, CAME, SM3, AdamP",
        [(f"{rule}, {LLAMA}", FOREACH) for rule in RULES],
        "times as fast",
    ),
    Line("Muon on the 192 matrices of GPT-2 XL, over its products alone", [(MUON, "step, times its products alone")]),
    Line("the same against torch's Muon", [(MUON, "step, times as fast as torch.optim.Muon")], "times as fast"),
    Line(
        "AdamW at 100 Mi with states in `dynamic8`, `int8`, `float8_e4m3`, `softsign8`, `dynamic4`: its step over that "
        "with states in float32",
        [(f"adamw, states in {each}", OF_FLOATS) for each in ("dynamic8", "int8", "float8_e4m3", "softsign8",
                                                              "dynamic4")],
    ),
    Line(
        "AdamW with states in `dynamic8` against bitsandbytes",
        [("adamw, states in dynamic8", "step, times as fast as bitsandbytes' AdamW8bit")],
        "times as fast",
    ),
    Line(
        "AdamW with bfloat16 weights kept by `split`, `kahan`, `stochastic`, of the bandwidth of a copy",
        [(f"adamw, bfloat16 weights, {each}", OF_COPY) for each in ("split", "kahan", "stochastic")],
    ),
    Line(
        "Adafactor on 10,240 by 10,240 against torch's foreach step",
        [("adafactor, float32", "step, times as fast as torch.optim.Adafactor(foreach=True)")],
        "times as fast",
    ),
    Line(
        "Adafactor, CAME, SM3, AdamP, Adam-mini on 10,240 by 10,240, of the bandwidth of a copy for what their stages "
        "move",
        [(f"{rule}, float32", OF_STAGES) for rule in (*RULES, "adam_mini")],
    ),
    Line(
        "Adam on 400 MB against four fused broadcasts of CuPy, and against plain operators",
        [("adam, one tensor of 100,000,000 elements", f"step, times as fast as CuPy's {each}")
         for each in ("four fused broadcasts", "plain operators")],
        "times as fast",
    ),
    Line(
        "AdamW and Lion at 100 Mi against optimi",
        [(f"{rule}, one tensor of 100 Mi elements", "step, times as fast as optimi") for rule in ("adamw", "lion")],
        "times as fast",
    ),
    Line(
        "AdamW and Lion in JAX at 100 Mi against optax under one jit",
        [(f"{rule}, float32, in JAX", f"step in JAX, times as fast as optax.{rule}") for rule in ("adamw", "lion")],
        "times as fast",
    ),
)  # fmt: skip


def measured(folder: Path = FOLDER) -> str:
    """The lines with their figures, targets and days; KeyError for a row that was not measured."""
    result = page.read(folder / "gpu.json")
    rows = {(row.subject, row.measure): row for row in result.rows}
    return table(
        ["", "measured", "wanted", "on"], [_cells(line, [rows[key] for key in line.rows], result) for line in LINES]
    )


def _cells(line: Line, rows: Sequence[Row], result: Result) -> list[str]:
    figures = ", ".join(page.figure(row) for row in rows)
    wanted = ", ".join(dict.fromkeys(page.target(row) for row in rows if row.target is not None))
    days = ", ".join(dict.fromkeys((result.parts.get(row.part) or result).measured for row in rows))
    return [line.words, f"{figures} {line.behind}".strip(), wanted, days]


MAKERS: Mapping[str, Callable[[], str]] = {"gpu-measured": measured}
