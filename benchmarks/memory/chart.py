"""The picture of the memory of training: bars of weights, state, gradients and temporaries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.memory.steps import RULES, WAYS, WEIGHTS
from benchmarks.picture import figure_of, save
from benchmarks.result import Result
from rulec.errors import RulecError
from rulec.memory.live import KINDS

_COLOURS = {
    "weights": "#4c566a", "state": "#5e81ac", "gradients": "#bf616a", "temporaries": "#ebcb8b",
}  # fmt: skip

#: Kinds from the bottom to the top of a bar; activations are of the batch and not of the rule.
_STACKED = [kind for kind in ("weights", "state", "gradients", "temporaries") if kind in KINDS]

#: The bars of one model: rule and way -> bytes by kind.
Bars = dict[tuple[str, str], Mapping[str, int]]


def bars_of(result: Result) -> dict[str, Bars]:
    """The bytes by kind, without activations, of every model, rule and way in a result."""
    bars: dict[str, Bars] = {}
    for row in result.rows:
        if row.measure == WEIGHTS:
            model, rule, way = row.subject.rsplit(", ", 2)
            bars.setdefault(model, {})[rule, way] = row.detail["beside_activations"]
    return bars


def draw(result: Result, path: Path) -> None:
    """Writes a PNG with a panel for each model.

    RulecError where there is nothing to draw, where matplotlib is missing, and where the file cannot be written.
    """
    bars = bars_of(result)
    if not bars:
        raise RulecError("there is nothing to draw: --chart is of the training steps of rulec bench memory, with torch")
    figure = figure_of(4.2 * len(bars), 4.4)
    panels = figure.subplots(1, len(bars), sharey=True, squeeze=False)[0]
    for axes, (model, by_way) in zip(panels, bars.items(), strict=True):
        _panel(axes, by_way)
        axes.set_title(model, fontsize=10)
    panels[0].set_ylabel("most at once without activations, in weights")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    save(figure, path)


def _panel(axes: Any, by_way: Bars) -> None:
    """The bars of one model: a group for each rule, with a bar for each way."""
    rules = [rule for rule in RULES if any(rule == r for r, _ in by_way)]
    places, names, bars = _places(rules, by_way)
    bottom = [0.0] * len(bars)
    for kind in _STACKED:
        heights = [bar[kind] / bar["weights"] for bar in bars]
        axes.bar(places, heights, 0.8, bottom, label=kind, color=_COLOURS[kind])
        bottom = [below + height for below, height in zip(bottom, heights, strict=True)]
    for place, top in zip(places, bottom, strict=True):
        axes.text(place, top, f"{top:.2f}", ha="center", va="bottom", fontsize=7)
    axes.set_xticks(places, names, rotation=90, fontsize=8)
    axes.margins(y=0.1)
    axes.spines[["top", "right"]].set_visible(False)


def _places(rules: Sequence[str], by_way: Bars) -> tuple[list[float], list[str], list[Mapping[str, int]]]:
    """The places of the bars, the labels below them, and their bytes by kind."""
    places, names, bars = [], [], []
    for number, rule in enumerate(rules):
        for place, way in enumerate(way for way in WAYS if (rule, way) in by_way):
            places.append(number * (len(WAYS) + 0.7) + place)
            names.append(f"{rule} {way}")
            bars.append(by_way[rule, way])
    return places, names, bars
