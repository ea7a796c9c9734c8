"""The figures of docs/watch.md, from what `examples.gpt.watch` last wrote."""

from __future__ import annotations

import json
from typing import Any

from examples.gpt.watch import FALLING, RATES, TIMES, WATCH, shown, usual
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


MAKERS = {"watch-run": run, "watch-statistics": statistics, "watch-steps": steps}
