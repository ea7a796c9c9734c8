"""The figures of docs/watch.md, from what `examples.gpt.watch` and `tests.backends.watch_code` last wrote."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import rulec
from examples.gpt.watch import FALLING, RATES, TIMES, WATCH, shown, usual
from tests.backends.watch_code import ARCHITECTURE, BACKENDS, DTYPES, FILE, StageCost, stage_cost
from tests.docs.markdown import ROOT
from tests.docs.table import table

RESULTS = ROOT / "docs" / "data" / "watch.json"


def run() -> str:
    """The command, the model and its text."""
    results = record()
    size, (high, low) = results["size"], RATES
    return (
        f"`python -m examples.gpt.watch`: {size['layers']} layers of width {size['width']}, {size['sequences']} "
        f"sequences of {size['length']} bytes in a batch, {results['steps']} steps of Lion on a CPU, at a rate of "
        f"{high:g} and at {low:g}."
    )


def statistics() -> str:
    """A row for each statistic of the picture: its expression, its usual value, and the bound that shows a failure."""
    (high, _) = [each["curves"] for each in record()["runs"] if "curves" in each]
    rows = []
    for name, text in WATCH.items():
        center = usual(high[name])
        bound = f"nearer to 0 than {center / TIMES:.2g}" if name in FALLING else f"above {center * TIMES:.2g}"
        rows.append([f"`{name}`", f"`{text}`", f"{center:.2g}", bound])
    return table(["statistic", "expression", "its usual value", "it shows the failure when it is"], rows)


def steps() -> str:
    """A row for each training: the steps at which the loss and each statistic show a failure, and how far apart."""
    rows = []
    for each in record()["runs"]:
        of_loss = each["shown"]["loss"]
        cells = [_step(each["shown"][name], of_loss) for name in WATCH]
        rows.append([f"{each['rate']:g}", str(each["seed"]), _step(of_loss, None), *cells])
    return table(["rate", "seed", "loss", *(f"`{name}`" for name in WATCH)], sorted(rows, key=_order))


def _order(row: list[str]) -> tuple[float, int]:
    return -float(row[0]), int(row[1])


def _step(step: int | None, of_loss: int | None) -> str:
    """A step, and how many it is before the loss's."""
    if step is None:
        return "never"
    if of_loss is None:
        return str(step)
    return f"{step}, {abs(of_loss - step)} {'earlier' if step < of_loss else 'later'}"


def record() -> dict[str, Any]:
    """What the command wrote; AssertionError where it measures something else by now."""
    results: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8"))
    assert results["watch"] == WATCH, "examples.gpt.watch measures other statistics by now: run it anew"
    for each in results["runs"]:
        assert "curves" not in each or each["shown"] == shown(each["curves"]), "the rule for curves is another by now"
    return results


def code() -> str:
    """Bytes and instructions of an element in the kernels of GPUs, without and with statistics, and what they keep."""
    costs = [stage_cost(row) for row in json.loads(FILE.read_text())]
    assert not any(c.plain.stack or c.measured.stack for c in costs), "a kernel keeps values in local memory"
    by_backend = [[c for c in costs if c.backend == backend] for backend in BACKENDS]
    wide = [f"{max(c.measured.wide for c in each):g}" for each in by_backend]
    before = [max(c.plain.registers for c in each) for each in by_backend]
    after = [max(c.measured.registers for c in each) for each in by_backend]
    return (
        f"{_stages(costs)}\n\nFor compute capability {ARCHITECTURE / 10:.1f}, by "
        f"`python -m tests.backends.watch_code`. No kernel keeps a value in local memory. Up to {wide[0]} of the "
        f"instructions in CUDA C, and {wide[1]} in Triton, convert to float64 or add in it. A thread has up to "
        f"{after[0]} registers in CUDA C, {before[0]} without statistics, and up to {after[1]} in Triton, {before[1]} "
        f"without."
    )


def _stages(costs: Sequence[StageCost]) -> str:
    """A row for each stage of a rule."""
    kinds = [(backend, dtype) for backend in BACKENDS for dtype in DTYPES]
    stages: dict[tuple[str, int], dict[tuple[str, str], StageCost]] = {}
    for each in costs:
        stages.setdefault((each.rule, each.stage), {})[each.backend, each.dtype] = each
    rows = []
    for (rule, stage), of_kind in stages.items():
        place = f", stage {stage + 1}" if (rule, 1) in stages else ""
        first = of_kind[kinds[0]]
        moved = [f"{cost.read + cost.written:g}" for cost in (first.plain, first.measured)]
        pairs = [(of_kind[kind].plain.instructions, of_kind[kind].measured.instructions) for kind in kinds]
        counted = [f"{plain:.1f}, {measured:.1f}" for plain, measured in pairs]
        rows.append([f"{rulec.load(rule).name}{place}", ", ".join(moved), *counted])
    words = {"cupy": "CUDA C", "triton": "Triton"}
    return table(["", "bytes, CUDA C, float32", *(f"{words[backend]}, {dtype}" for backend, dtype in kinds)], rows)


MAKERS = {"watch-run": run, "watch-statistics": statistics, "watch-steps": steps, "watch-code": code}
