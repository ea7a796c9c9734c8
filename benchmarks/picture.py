"""Pictures of results, as PNG files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rulec.errors import RulecError
from rulec.extras import needing


def figure_of(width: float, height: float) -> Any:
    """An empty figure of matplotlib's, in inches; RulecError where matplotlib is missing."""
    with needing("a chart", "demo"):
        from matplotlib.figure import Figure
    return Figure(figsize=(width, height), layout="constrained")


def save(figure: Any, path: Path) -> None:
    """Writes a figure, and the folders above it; RulecError where it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="png", dpi=110)
    except OSError as error:
        raise RulecError(f"{path} cannot be written: {error.strerror or error}") from None
