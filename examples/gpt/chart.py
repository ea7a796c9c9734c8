"""The picture of a training: the losses of every contender, step by step, and their distance from their peer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.picture import figure_of, save

_COLOURS = ("#5e81ac", "#bf616a", "#a3be8c", "#b48ead", "#d08770", "#88c0d0", "#4c566a")

_PEER: dict[str, Any] = {"linewidth": 2.4, "alpha": 0.45}
_OURS: dict[str, Any] = {"linewidth": 1, "linestyle": "--"}


#: The steps that a point of a line of losses is the mean of: batches differ more than optimizers.
_SPAN = 5


def _smoothed(values: list[float], span: int = _SPAN) -> list[float]:
    return [fmean(values[max(0, i - span + 1) : i + 1]) for i in range(len(values))]


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


def draw_watch(runs: Sequence[dict[str, Any]], span: int, path: Path) -> None:
    """Writes a PNG with a panel for the loss and for each statistic, of two runs of `examples.gpt.watch`.

    Curves are means of `span` steps. A line in a panel stands where it shows that the first run fails.
    """
    figure = figure_of(9.5, 5)
    panels = zip(runs[0]["curves"], figure.subplots(2, 2, sharex=True).flat, strict=True)
    for name, axes in panels:
        for run, colour in zip(runs, ("#bf616a", "#5e81ac"), strict=True):
            _watched(axes, [abs(value) for value in run["curves"][name]], span, colour, f"rate {run['rate']:g}")
        step = runs[0]["shown"][name]
        if step is not None:
            axes.axvline(step, color="#4c566a", linewidth=1, linestyle="--")
            axes.annotate(f" step {step}", (step, 0.9), xycoords=("data", "axes fraction"), fontsize=8)
        axes.set_title({"loss": "loss, in nats", "cosine": "cosine, without its sign"}.get(name, name), fontsize=10)
        axes.set_yscale("log")
        axes.spines[["top", "right"]].set_visible(False)
        if name == "loss":
            axes.set_yticks([3, 4, 5], ["3", "4", "5"])
            axes.minorticks_off()
            axes.legend(fontsize=8, frameon=False, loc="upper right")
        axes.tick_params(which="both", labelsize=7)
    figure.supxlabel("step", fontsize=8)
    save(figure, path)


def _watched(axes: Any, values: list[float], span: int, colour: str, label: str) -> None:
    """A curve: each step faintly, and the mean of the last ones."""
    steps = range(1, len(values) + 1)
    axes.plot(steps, values, color=colour, linewidth=0.4, alpha=0.35)
    axes.plot(steps[span - 1 :], _smoothed(values, span)[span - 1 :], color=colour, linewidth=1.6, label=label)
