"""The table of a race, as text and as HTML."""

from __future__ import annotations

import html
from collections.abc import Sequence

from rulec.tools.race.outcome import Outcome

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
    first = outcomes[0]
    rates, seeds = first.final.shape
    return f"{task}: {rates} learning rates x {seeds} seeds for each rule, {len(first.losses)} steps"


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
