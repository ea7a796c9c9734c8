"""The cards of all rules, and the fields by which they are searched."""

from __future__ import annotations

from collections.abc import Sequence

from gallery.page import Entry
from rulec.tools.display.drawing import symbol

FAMILIES = ("elementwise", "norms and means", "whole model", "matrices", "transform", "wrapper")
#: Least and greatest bytes of state of a choice, and its words.
SIZES = ((0.0, 0.5, "hardly any"), (0.5, 4.5, "up to 4"), (4.5, 8.5, "up to 8"), (8.5, 1e9, "more"))
#: First and last year of a choice.
YEARS = ((0, 2011), (2012, 2016), (2017, 2019), (2020, 2022), (2023, 9999))


def cards(entries: Sequence[Entry]) -> str:
    """The fields and the cards as HTML."""
    every = "".join(entry.card for entry in entries)
    script = '<script src="javascripts/gallery.js"></script>'
    return f'{symbol()}{_fields(len(entries))}<div class="rule-cards">{every}</div>{script}'


def _fields(count: int) -> str:
    years = [(f"{first}:{last}", _years(first, last)) for first, last in YEARS]
    sizes = [(f"{low:g}:{high:g}", words) for low, high, words in SIZES]
    orders = [("name", "name"), ("year", "newest first"), ("bytes", "least state first")]
    return (
        '<form class="rule-search" role="search">'
        '<label>Name or word<input type="search" name="words" placeholder="adam, sign, Kingma"></label>'
        + _choice("Family", "family", [("", "all"), *((family, family) for family in FAMILIES)])
        + _choice("Year", "year", [("", "all"), *years])
        + _choice("Bytes of state", "bytes", [("", "all"), *sizes])
        + _choice("Order", "order", orders)
        + f'<output aria-live="polite">{count} rules</output></form>'
    )


def _choice(label: str, name: str, options: Sequence[tuple[str, str]]) -> str:
    inner = "".join(f'<option value="{value}">{words}</option>' for value, words in options)
    return f'<label>{label}<select name="{name}">{inner}</select></label>'


def _years(first: int, last: int) -> str:
    return f"to {last}" if not first else f"from {first}" if last == 9999 else f"{first} to {last}"
