"""The charts above the tables, as bars of HTML in the colours of the page.

A chart is a table of labels and figures; where styles are left out, as on a code host, the figures still stand there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from benchmarks.result import Result, Row


@dataclass(frozen=True)
class Chart:
    """One chart: `sources` has the name of a measurement and a pattern of the rows of a bar, `Row.what`.

    The groups of a pattern are the label of the bar. `chapter` is the measurement whose chapter says more.
    """

    title: str
    text: str
    chapter: str
    sources: Sequence[tuple[str, str]]


_FASTER = "A bar shows how many times as fast rulec is; 1 is the same speed."

CHARTS = (
    Chart(
        "Large tensors", f"A kernel and torch's fused or foreach step, on one large tensor. {_FASTER}", "rules",
        [("rules", r"(adadelta|adagrad|adamw?|nadam|rmsprop|sgd), .*: kernel, times as fast as (torch's \w+ step)")],
    ),
    Chart(
        "Many tensors", f"A whole step of AdamW and torch's fused step. {_FASTER}", "many",
        [
            ("many", r"([\d,]+ tensors of [\d,]+): step, times as fast as torch's fused step"),
            ("reductions", r"(clip_by_global_norm >> adamw, 1000 tensors of 1,000), .*: .* clipping and fused step"),
        ],
    ),
    Chart(
        "Rows and columns", f"A step with norms and means, and the fastest Python implementation. {_FASTER}",
        "reductions", [("reductions", r"(.*): step, times as fast as the fastest Python implementation")],
    ),
    Chart(
        "Small states", f"A step of AdamW with states of 8 or 4 bits, and other libraries. {_FASTER}", "states",
        [
            ("states", r"AdamW, [\d,]+ elements, (cpu, states in \w+): step, times as fast as with (\w+'s? \w+);.*"),
            ("gpu", r"adamw, (states in \w+): step, times as fast as (bitsandbytes' \w+)"),
        ],
    ),
    Chart(
        "Memory of training", "The most memory that a step needs to train a Llama of 7.5 billion weights, without "
        "activations, divided by the size of the weights. *Deferred* updates after the backward pass, and *eager* "
        "updates inside it.", "memory",
        [("memory", r"Llama of 7.5B, (\w+, (?:deferred|eager)): most at once without activations, times the weights")],
    ),
    Chart(
        "GPU", f"A step on a GPU, and the fastest step of torch. {_FASTER}", "gpu",
        [
            ("gpu", r"(adamw, the tensors of GPT-2 XL): step, times as fast as (torch's fused step)"),
            ("gpu", r"(adamw, 1000 tensors of 1000 elements): step, times as fast as (torch's fused step)"),
            ("gpu", r"(adafactor, 146 tensors as of Llama 3.2 1B): .*, times as fast as (torch's foreach Adafactor)"),
            ("gpu", r"(muon, the 192 matrices of GPT-2 XL): step, times as fast as (torch.optim.Muon)"),
        ],
    ),
)  # fmt: skip


def charts(results: Mapping[str, Result], figure: Mapping[int, str], chapters: str) -> str:
    """The charts that have rows, as Markdown with HTML.

    `figure` has id of a row -> its text, and `chapters` is the folder of the chapters.
    """
    drawn = [_drawn(chart, bars, figure, chapters) for chart in CHARTS if (bars := bars_of(chart, results))]
    return "\n".join(drawn)


def bars_of(chart: Chart, results: Mapping[str, Result]) -> list[tuple[str, Row]]:
    """The label and the row of each bar, in the order of the patterns and of the rows."""
    return [
        (", beside ".join(match.groups()), row)
        for name, pattern in chart.sources if name in results
        for row in results[name].rows if (match := re.fullmatch(pattern, row.what))
    ]  # fmt: skip


def _drawn(chart: Chart, bars: Sequence[tuple[str, Row]], figure: Mapping[int, str], chapters: str) -> str:
    longest = max(row.value for _, row in bars)
    one = f"{100 / longest:.1f}%" if longest > 1 else "100%"
    lines = [f"## {chart.title}", "", f"{chart.text} [All figures]({chapters}/{chart.chapter}.md).", ""]
    lines.append(f'<table class="bars" style="--one: {one}">')
    for label, row in bars:
        width = f"{100 * row.value / longest:.1f}%"
        cell = f'<td><span style="width: {width}"></span></td><td>{figure[id(row)]}</td>'
        lines.append(f'<tr><th scope="row">{escape(label)}</th>{cell}</tr>')
    return "\n".join([*lines, "</table>", ""])
