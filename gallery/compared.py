"""Comparisons of a rule with implementations that are not ours, as docs/data/peers.json has them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FILE, RULES = ROOT / "docs" / "data" / "peers.json", ROOT / "rules"

#: Distances that the rounding of float32 explains.
FLOAT32 = 1e-6


@cache
def measured() -> dict[str, Any]:
    """The steps, the versions of the packages, and the rows."""
    content: dict[str, Any] = json.loads(FILE.read_text())
    return content


def comparisons(name: str) -> list[dict[str, Any]]:
    """The rows about a rule."""
    return [row for row in measured()["rows"] if name in subjects(row["rule"])]


def remark_of(row: Mapping[str, Any]) -> str:
    """The changes of a comparison to theirs, and the options that it sets there."""
    options = f"with {', '.join(row['options'])}" if "options" in row else ""
    return "; ".join(filter(None, (row.get("remark", ""), options)))


def unchanged(row: Mapping[str, Any]) -> str:
    """How far theirs is where nothing is changed in it, by the number of dimensions; empty where nothing is changed.

    A distance below that of float32 is the rounding in a remark.
    """
    if "called" not in row:
        return ""
    apart = {count: value for count, value in row["called"].items() if value is not None}
    refused = [count for count, value in row["called"].items() if value is None]
    parts = [f"{value:.1e} in {count}D" for count, value in apart.items()]
    if apart and max(apart.values()) < FLOAT32:
        parts = [f"{max(apart.values()):.1e}"]
    return ", ".join([*parts, *([f"refuses {', '.join(f'{count}D' for count in refused)}"] if refused else [])]) or "0"


def subjects(composed: str) -> list[str]:
    """The rules that a comparison is about: the transforms in it; else its rule, and how its weights decay."""
    while "(" in composed:
        composed = re.sub(r"\([^()]*\)", "", composed)
    names = [*map(_full, re.split(r" >> | \+ ", composed))]
    decays = [f"transforms/{name}" for name in ("l2", "decay")]
    return [name for name in names if name.startswith("transforms/") and name not in decays] or names


def _full(name: str) -> str:
    """The name of a rule, or of a transform, in the library."""
    return name if "/" in name or (RULES / f"{name}.yaml").is_file() else f"transforms/{name}"
