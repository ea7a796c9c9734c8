"""The pictures of README.md that are drawn of its own rule: `python -m tests.docs.pictures` writes both into docs/.

`idea.png` has the rule, its kernel and its training; `race.png` the race of README.md's command.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np

import rulec
from benchmarks.picture import figure_of, save
from rulec.tools.display.kernels import kernel_source
from rulec.tools.race.outcome import Outcome, spans_of
from rulec.tools.race.result import Result
from tests.docs.markdown import ROOT, blocks

#: Colours of the rules of a race, in their order on the command line.
COLOURS = ("#bf616a", "#5e81ac", "#a3be8c", "#b48ead", "#d08770")
GREY = "#4c566a"


def rule_text() -> str:
    """The first rule of README.md."""
    return next(block.text for block in blocks((ROOT / "README.md").read_text()) if block.title == "tempered.yaml")


def command() -> str:
    """The command of the race, under its picture in README.md."""
    match = re.search(r"`(rulec race [^`]*)`", (ROOT / "README.md").read_text())
    assert match is not None, "README.md has no race"
    return match[1]


def run(line: str, **options: Any) -> Result:
    """The race of a command, with the rule of README.md for its file."""
    words = shlex.split(line)[2:]
    cut = words.index("--lr")
    rules = {name: rulec.parse(rule_text()) if name.endswith(".yaml") else rulec.load(name) for name in words[:cut]}
    return rulec.race(rules, lr=spans_of([words[cut + 1]]), **options)


def draw_idea(result: Result, path: Path) -> None:
    """Draws the rule, its kernel in C, and its losses at its best learning rate."""
    figure = figure_of(11, 4.4)
    grid = figure.add_gridspec(2, 2, width_ratios=(1, 1.4), height_ratios=(1, 1.2))
    rule, kernel, training = (figure.add_subplot(place) for place in (grid[0, 0], grid[:, 1], grid[1, 0]))
    _text(rule, "1  You write the step", rule_text())
    _text(kernel, "2  rulec writes one fused kernel, here in C", _kernel())
    training.set_title("3  You train with it", loc="left", fontsize=11, color=GREY)
    outcome = next(each for each in result.outcomes if each.label.endswith(".yaml"))
    _curve(training, outcome, COLOURS[0])
    _axes(training, "step", f"training loss, {result.task}")
    save(figure, path)


def draw_race(result: Result, line: str, path: Path) -> None:
    """Draws the losses of all rules at their best learning rates, and their final losses at every rate."""
    figure = figure_of(10.5, 3.8)
    figure.suptitle(f"$ {line}", x=0.01, ha="left", fontsize=9, family="monospace", color=GREY)
    curves, finals = figure.subplots(1, 2)
    outcomes = sorted(result.outcomes, key=lambda outcome: shlex.split(line).index(outcome.label))
    for outcome, colour in zip(outcomes, COLOURS, strict=False):
        _curve(curves, outcome, colour)
        finite = np.isfinite(outcome.by_rate)
        rates = np.array(outcome.grid.rates)
        finals.plot(rates[finite], outcome.by_rate[finite], "o-", color=colour, markersize=3, label=outcome.label)
    finals.set_xscale("log")
    _axes(curves, "step", f"training loss at the best learning rate, {result.task}")
    _axes(finals, "learning rate", "final training loss")
    finals.legend(fontsize=8, frameon=False)
    save(figure, path)


def _kernel() -> str:
    """The function of one element, without its comments."""
    source = kernel_source(rulec.parse(rule_text()), "c", "float32")
    body = source[source.index("RULEC_FUNCTION void step_element") :]
    return re.sub(r"  //.*", "", body[: body.index("\n}") + 2]).removeprefix("RULEC_FUNCTION ")


def _text(axes: Any, title: str, text: str) -> None:
    axes.set_axis_off()
    axes.set_title(title, loc="left", fontsize=11, color=GREY)
    axes.text(0, 0.98, text, family="monospace", fontsize=8, va="top", transform=axes.transAxes, linespacing=1.3)


def _curve(axes: Any, outcome: Outcome, colour: str) -> None:
    """The mean over seeds at the best learning rate, and the range over seeds."""
    assert outcome.best is not None
    steps, losses = outcome.curve(outcome.best)
    label = f"{outcome.label}, lr {outcome.grid.rates[outcome.best]:.1e}"
    axes.plot(steps, losses.mean(axis=1), color=colour, linewidth=1.2, label=label)
    axes.fill_between(steps, losses.min(axis=1), losses.max(axis=1), color=colour, alpha=0.2, linewidth=0)
    axes.legend(fontsize=8, frameon=False)


def _axes(axes: Any, x: str, y: str) -> None:
    axes.set_xlabel(x, fontsize=8)
    axes.set_ylabel(y, fontsize=8)
    axes.set_yscale("log")
    axes.tick_params(which="both", labelsize=7)
    axes.spines[["top", "right"]].set_visible(False)


def main() -> None:
    line = command()
    result = run(line)
    draw_idea(result, ROOT / "docs" / "idea.png")
    draw_race(result, line, ROOT / "docs" / "race.png")
    print(result.table())


if __name__ == "__main__":
    main()
