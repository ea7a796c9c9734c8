"""The table of optax's functions: which rule each means, and what optax computes otherwise than the rule."""

from __future__ import annotations

from rulec.jax.entries import Entry, entries, index
from tests.docs.table import table


def optax_functions() -> str:
    """Every function of optax's name, by the keywords that choose its rule."""
    rows = [_row(entry) for function in sorted(index(), key=_place) for entry in entries(function)]
    return table(["function", "where", "rule", "lines that are otherwise"], rows)


def _place(function: str) -> tuple[bool, bool, str]:
    """optax's own functions before those of optax.contrib, and in both those for the direction alone last."""
    return "." in function, entries(function)[0].scales, function


def _row(entry: Entry) -> list[str]:
    said = {"nonzero": "not 0", "given": "given"}
    flags = ", ".join(f"`{key}` {said.get(str(value), value)}" for key, value in entry.when.items())
    starts = [f"`{name}` begins at `{value}`" for name, value in entry.start.items()]
    lines = [f"`{name} = {text}`" for name, text in entry.lines.items()]
    composed = {"l2": f"`l2 >> {entry.file}`", "decay": f"`{entry.file} + decay`"}
    return [f"`{entry.function}`", flags, composed.get(entry.decay, f"`{entry.file}`"), "<br>".join([*lines, *starts])]
