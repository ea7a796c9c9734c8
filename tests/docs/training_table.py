"""The table of docs/training.md, from what `examples.gpt.train` last wrote."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tests.docs.markdown import ROOT
from tests.docs.table import table

RESULTS = ROOT / "docs" / "data" / "gpt.json"

HEAD = (
    "contender", "last loss, nats", "tokens a second", "times as fast as its peer", "the optimizer's share of a step",
    "peak, MiB", "its peer", "losses apart at most",
)  # fmt: skip


def contenders() -> str:
    """A row for each contender."""
    return table(HEAD, [_row(name, run) for name, run in _record()["runs"].items()])


def run() -> str:
    """The command, and the model, machine and day of its run."""
    record = _record()
    size, machine = record["size"], record["machine"]
    versions = ", ".join(f"{name} {machine['versions'][name]}" for name in ("torch", "jax", "optax"))
    return (
        f"`python -m examples.gpt.train --size {size['name']}`: {size['layers']} layers of width {size['width']}, "
        f"{size['sequences']} sequences of {size['length']} bytes in a batch, {record['steps']} steps, learning rate "
        f"{size['lr']:g}, on {record['device']} ({machine['cpu']}, {machine['cores']} cores; {versions})."
    )


def _record() -> dict[str, Any]:
    record: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8"))
    return record


def _row(name: str, run: Mapping[str, Any]) -> list[str]:
    optional = {
        "times as fast as its peer": "{:.2f}",
        "share of the optimizer": "{:.1%}",
        "peak bytes": "{:.0f}",
        "peer": "{}",
        "largest difference of losses in 100 steps": "{:.0e}",
    }
    scaled = {**run, **({"peak bytes": run["peak bytes"] / 2**20} if "peak bytes" in run else {})}
    cells = [text.format(scaled[key]) if key in scaled else "" for key, text in optional.items()]
    return [name, f"{run['losses'][-1]:.4f}", f"{run['tokens a second']:.0f}", *cells]


MAKERS = {"training": contenders, "training-run": run}
