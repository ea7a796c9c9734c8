"""The report of a race: an HTML page with interactive plots, and the table as text and as HTML.

The page is one file that opens without a network.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

import numpy as np

from rulec.extras import needing
from rulec.tools.race.outcome import Outcome

_STYLE = """
body { font: 16px/1.4 system-ui, sans-serif; margin: 1.5rem auto; max-width: 70rem; padding: 0 1rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; }
th, td { padding: .25rem .75rem; text-align: left; border-bottom: 1px solid #ccc; white-space: nowrap; }
"""

_ABOUT = (
    "All rules have the same first weights, the same data in the same order, and the same number of steps and runs. "
    "The final loss is the mean training loss of the last tenth of the steps; ± is the standard deviation over seeds. "
    "Good rates lie around the best one and keep nine tenths of its progress from the first loss. "
    "A run has diverged where its loss or its gradient is not finite."
)

#: No logo with a link, and no button that sends the data anywhere.
_CONFIG = {"displaylogo": False, "showSendToCloud": False, "responsive": True}


def check() -> None:
    """MissingExtra where plotly is not installed."""
    with needing("the page of a race", "race"):
        import plotly  # noqa: F401


def page(task: str, outcomes: Sequence[Outcome]) -> str:
    """The page, with plotly's script in it; MissingExtra where plotly is not installed."""
    check()
    names = dict.fromkeys(name for outcome in outcomes for name in outcome.statistics)
    plots = [_curves(outcomes), _rates(outcomes), *(_statistic(outcomes, name) for name in names)]
    parts = [
        plot.to_html(full_html=False, include_plotlyjs=not i, include_mathjax=False, config=_CONFIG, div_id=f"plot{i}")
        for i, plot in enumerate(plots)
    ]
    name, drawn = f"A race on {html.escape(task)}", "\n".join(parts)
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{name}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_STYLE}</style></head>\n'
        f'<body><h1>{name}</h1><div class="wide">{html_table(task, outcomes)}</div>\n{drawn}\n'
        f"<p>{_ABOUT}</p></body></html>\n"
    )


def _curves(outcomes: Sequence[Outcome]) -> Any:
    """The loss over the steps at the best rate of each rule: the mean over seeds, and the range."""
    import plotly.graph_objects as go

    plot, shown = go.Figure(), []
    for place, outcome in enumerate(outcomes):
        if outcome.best is not None:
            steps, losses = outcome.curve(outcome.best)
            rate = outcome.grid.rates[outcome.best]
            _band(plot, place, f"{html.escape(outcome.label)}, lr {short(rate)}", steps, losses)
            shown.append(losses)
    _finish(plot, "Training loss at the best learning rate", shown)
    plot.update_xaxes(title="step")
    return plot


def _statistic(outcomes: Sequence[Outcome], statistic: str) -> Any:
    """A statistic over the steps at the best rate of each rule that has it: the mean over seeds, and the range."""
    import plotly.graph_objects as go

    plot, shown = go.Figure(), []
    for place, outcome in enumerate(outcomes):
        if outcome.best is not None and statistic in outcome.statistics:
            steps, values = outcome.curve(outcome.best, statistic)
            _band(plot, place, html.escape(outcome.label), steps, values)
            shown.append(values)
    name = html.escape(statistic)
    _finish(plot, f"{name} at the best learning rate, the mean over tensors", shown)
    plot.update_xaxes(title="step")
    plot.update_yaxes(title=name)
    return plot


def _rates(outcomes: Sequence[Outcome]) -> Any:
    """The final loss over the learning rate: the mean over seeds, and the range; a gap where a run diverged."""
    import plotly.graph_objects as go

    plot, shown = go.Figure(), []
    for place, outcome in enumerate(outcomes):
        rates = np.array(outcome.grid.rates)
        _band(plot, place, html.escape(outcome.label), rates, outcome.final)
        _best(plot, place, outcome)
        shown.append(outcome.final)
    _finish(plot, "Final loss at each learning rate (a gap: runs diverged)", shown)
    plot.update_xaxes(title="learning rate", type="log", exponentformat="power")
    return plot


def _band(plot: Any, place: int, name: str, at: Any, values: Any) -> None:
    """A line of means over the last axis, with a band from the lowest to the highest value."""
    whole = ~np.isnan(values).any(axis=-1)
    means = [float(row.mean()) if ok else None for row, ok in zip(values, whole, strict=True)]
    colour = _colour(place)
    common = {"legendgroup": str(place), "hoverinfo": "skip", "showlegend": False}
    edges = {"mode": "lines", "line": {"width": 0}, "fill": "toself", "fillcolor": colour, "opacity": 0.2, **common}
    for first, stop in _stretches(whole):
        part, x = values[first:stop], np.asarray(at)[first:stop].tolist()
        around = part.max(axis=-1).tolist() + part.min(axis=-1).tolist()[::-1]
        plot.add_scatter(x=x + x[::-1], y=around, **edges)
    plot.add_scatter(
        x=np.asarray(at).tolist(), y=means, mode="lines+markers" if len(means) <= 20 else "lines", name=name,
        line={"color": colour}, legendgroup=str(place), connectgaps=False,
    )  # fmt: skip


def _best(plot: Any, place: int, outcome: Outcome) -> None:
    """A star at the best rate."""
    if outcome.best is not None:
        marker = {"symbol": "star", "size": 14, "color": _colour(place)}
        rate, loss = outcome.grid.rates[outcome.best], float(outcome.by_rate[outcome.best])
        plot.add_scatter(
            x=[rate], y=[loss], mode="markers", marker=marker, legendgroup=str(place), showlegend=False,
            hovertemplate="best: lr %{x}, loss %{y}<extra></extra>",
        )  # fmt: skip


def _stretches(whole: Any) -> list[tuple[int, int]]:
    """The stretches of places that are true, as (first, stop)."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], whole, [False])).astype(int)))
    return [(int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def _colour(place: int) -> str:
    from plotly.colors import qualitative

    return str(qualitative.D3[place % len(qualitative.D3)])


def _finish(plot: Any, title: str, shown: list[Any]) -> None:
    """Title and axes; the losses on a logarithmic axis where all of them are positive."""
    positive = all((values[~np.isnan(values)] > 0).all() for values in shown)
    plot.update_layout(title=title, template="plotly_white", height=520, hovermode="closest")
    plot.update_layout(legend={"orientation": "h", "yref": "container", "y": 0}, margin={"l": 60, "r": 20})
    plot.update_yaxes(title="loss", type="log" if positive else "linear", exponentformat="power")


#: The note below a table with a rate marked `*`.
EDGE = "* at the edge of the rates: widen --lr"


def columns(outcomes: Sequence[Outcome]) -> list[str]:
    """The headings."""
    measures = outcomes[0].measures
    return ["rule", "best lr", "final loss", *measures, "good rates", "diverged", "seconds"]


def cells(outcome: Outcome) -> list[str]:
    """One rule's line."""
    row, best = outcome.row(), outcome.best
    diverged = f"{row['diverged']} of {row['runs']}" if row["diverged"] else "none"
    seconds = f"{row['seconds']:.1f}"
    if best is None:
        return [outcome.label, "none", "diverged", *("" for _ in outcome.measures), "none", diverged, seconds]
    rate = f"{short(row['lr'])}{'*' if row['at_edge'] else ''}"
    loss = f"{row['loss']:.4g} ± {row['spread']:.1g}"
    measures = [figure(name, row[name]) for name in outcome.measures]
    return [outcome.label, rate, loss, *measures, width(outcome), diverged, seconds]


def short(rate: float) -> str:
    """A learning rate with two digits: `1.0e-3`."""
    digits, _, power = f"{rate:.1e}".partition("e")
    return f"{digits}e{int(power)}"


def ratio(value: float) -> str:
    """A ratio with two digits, and no power of ten: `2.7`, `52`, `720`."""
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def figure(name: str, value: float) -> str:
    """A figure of the task; an accuracy in per cent."""
    return f"{value:.1%}" if name.endswith("accuracy") else f"{value:.4g}"


def width(outcome: Outcome) -> str:
    """The good rates, and the ratio of the highest to the lowest: `1.0e-3–1.0e-2 x10`; `x10+` where the grid ends."""
    assert outcome.good is not None
    first, last = outcome.good
    low, high = outcome.grid.rates[first], outcome.grid.rates[last]
    if len(outcome.grid.rates) == 1:
        return "-"
    more = "+" if first == 0 or last == len(outcome.grid.rates) - 1 else ""
    return f"{short(low)}{f'–{short(high)}' if high > low else ''} x{ratio(high / low)}{more}"


def title(task: str, outcomes: Sequence[Outcome]) -> str:
    """The race in one line."""
    first, counts = outcomes[0], {len(outcome.grid.rates) for outcome in outcomes}
    rates = str(min(counts)) if len(counts) == 1 else f"{min(counts)} to {max(counts)}"
    steps, seeds = len(first.losses), len(first.grid.seeds)
    numbers = f"{rates} learning rate{'s' * (counts != {1})} x {seeds} seed{'s' * (seeds != 1)}"
    return f"{task}: {numbers} for each rule, {steps} step{'s' * (steps != 1)}"


def notes(outcomes: Sequence[Outcome]) -> list[str]:
    """Lines below the table."""
    return [EDGE] if any(outcome.at_edge for outcome in outcomes) else []


def text(task: str, outcomes: Sequence[Outcome]) -> str:
    """The table with its title and notes."""
    rows = [columns(outcomes), *(cells(outcome) for outcome in outcomes)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(n) for cell, n in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([title(task, outcomes), *lines, *notes(outcomes)])


def html_table(task: str, outcomes: Sequence[Outcome]) -> str:
    """The table as HTML."""
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in columns(outcomes))
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells(outcome)) + "</tr>" for outcome in outcomes
    )
    below = "".join(f"<p>{html.escape(note)}</p>" for note in notes(outcomes))
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f"<p>{html.escape(title(task, outcomes))}</p>{table}{below}"
