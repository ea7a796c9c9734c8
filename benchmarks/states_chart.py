"""The picture of small states: how far a run ends from that in floats, and how fast a step is."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.picture import figure_of, save
from benchmarks.result import Result
from rulec.errors import RulecError

#: Part of a measure -> label of its bars, for distances.
_DISTANCES = {"pixels of equal variance": "digits, pixels of equal variance", "plain pixels": "digits, plain pixels"}
_COLOURS = ("#5e81ac", "#bf616a", "#a3be8c")

#: Label -> name of a bar -> its length.
Bars = dict[str, dict[str, float]]


def distances_of(result: Result) -> Bars:
    """The distances of AdamW by input and storage."""
    bars: Bars = {label: {} for label in _DISTANCES.values()}
    for row in result.rows:
        match = re.fullmatch(r"AdamW, ((?:v|m|both) in \w+)", row.subject)
        label = next((label for part, label in _DISTANCES.items() if row.measure.endswith(part)), None)
        if match and label:
            bars[label][match[1]] = row.value
    return bars


def speeds_of(result: Result) -> Bars:
    """The speeds of a step by backend and storage, in units of the step with float32."""
    bars: Bars = {}
    for row in result.rows:
        match = re.fullmatch(r"AdamW, [\d,]+ elements, (\w+), (?:states in |(weights ))(\w+)", row.subject)
        if match and row.measure.startswith("step, times as fast as with float32"):
            bars.setdefault(f"backend {match[1]}", {})[(match[2] or "") + match[3]] = row.value
    return bars


def draw(result: Result, path: Path) -> None:
    """Writes a PNG with a panel of distances and one of speeds.

    RulecError where there is nothing to draw, where matplotlib is missing, and where the file cannot be written.
    """
    distances, speeds = distances_of(result), speeds_of(result)
    if not any(distances.values()) or not speeds:
        raise RulecError("there is nothing to draw: --chart is of the runs of rulec bench states, with torch")
    figure = figure_of(10.5, 4.6)
    left, right = figure.subplots(1, 2)
    _panel(left, distances, "distance from the run in floats, AdamW", "{:.3f}")
    left.set_xscale("log")
    _panel(right, speeds, "speed of a step, in units of the step in float32", "{:.2f}")
    right.axvline(1, color="#4c566a", linewidth=0.8)
    save(figure, path)


def _panel(axes: Any, bars: Mapping[str, Mapping[str, float]], title: str, form: str) -> None:
    """Horizontal bars: a group for each name, with a bar for each label."""
    names = list(dict.fromkeys(name for by_name in bars.values() for name in by_name))
    height = 0.8 / len(bars)
    for number, (label, by_name) in enumerate(bars.items()):
        places = [names.index(name) + (number - (len(bars) - 1) / 2) * height for name in by_name]
        drawn = axes.barh(places, [*by_name.values()], height, label=label, color=_COLOURS[number % len(_COLOURS)])
        axes.bar_label(drawn, [form.format(value) for value in by_name.values()], fontsize=6, padding=2)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set_title(title, fontsize=10)
    axes.legend(fontsize=7, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
