"""The picture of a training: the losses of every contender, step by step, and their distance from their peer."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.picture import figure_of, save

_COLOURS = ("#5e81ac", "#bf616a", "#a3be8c", "#b48ead", "#d08770", "#88c0d0", "#4c566a")

_PEER: dict[str, Any] = {"linewidth": 2.4, "alpha": 0.45}
_OURS: dict[str, Any] = {"linewidth": 1, "linestyle": "--"}


#: The steps that a point of a line of losses is the mean of: batches differ more than optimizers.
_SPAN = 5


def _smoothed(losses: list[float]) -> list[float]:
    return [fmean(losses[max(0, i - _SPAN + 1) : i + 1]) for i in range(len(losses))]


def draw(record: dict[str, Any], path: Path) -> None:
    """Writes a PNG with two panels: losses, and distances of losses between a contender and its peer."""
    figure = figure_of(10.5, 5)
    left, right = figure.subplots(1, 2)
    runs = record["runs"]
    peers = [name for name, run in runs.items() if "peer" not in run]
    colours = dict(zip(peers, _COLOURS, strict=False))
    for name, run in runs.items():
        peer = run.get("peer", name)
        left.plot(_smoothed(run["losses"]), color=colours[peer], label=name, **(_PEER if peer == name else _OURS))
        if peer != name:
            apart = [abs(a - b) for a, b in zip(run["losses"], runs[peer]["losses"], strict=True)]
            right.semilogy([max(value, 1e-7) for value in apart], linewidth=1, label=f"{name} from {peer}")
    left.set(title=f"loss in nats, mean of {_SPAN} steps", xlabel="step")
    right.set(title="distance of losses from the peer's", xlabel="step")
    for axes in (left, right):
        axes.legend(fontsize=7, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2)
        axes.spines[["top", "right"]].set_visible(False)
    save(figure, path)
