"""Comparisons of a rule with implementations that are not ours, as docs/data/peers.json has them."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

FILE = Path(__file__).resolve().parent.parent / "docs" / "data" / "peers.json"


@cache
def measured() -> dict[str, Any]:
    """The steps, the versions of the packages, and the rows."""
    content: dict[str, Any] = json.loads(FILE.read_text())
    return content


def comparisons(name: str) -> list[dict[str, Any]]:
    """The rows about a rule."""
    return [row for row in measured()["rows"] if name in subjects(row["rule"])]


def subjects(composed: str) -> list[str]:
    """The rules that a comparison is about: the transforms in it; else its rule, and how its weights decay."""
    wrapper, around, _ = composed.partition("(")
    names = [f"transforms/{wrapper}"] if around else re.split(r" >> | \+ ", composed)
    pieces = [name for name in names if name.startswith("transforms/")]
    return pieces or [f"transforms/{name}" if name in ("l2", "decay") else name for name in names]
