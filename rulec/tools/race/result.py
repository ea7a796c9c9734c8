"""The result of a race: the outcomes of all rules, as rows, runs, text, JSON, CSV, and a page."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rulec.errors import RulecError
from rulec.tools.race.outcome import Outcome, number
from rulec.tools.race.page import html_table, page, text


@dataclass(frozen=True)
class Result:
    """A race: one outcome for each rule, the lowest final loss first."""

    task: str
    outcomes: list[Outcome]

    @property
    def rows(self) -> list[dict[str, Any]]:
        """One dict for each rule, the lowest final loss first: what the table shows, as numbers."""
        return [outcome.row() for outcome in self.outcomes]

    @property
    def runs(self) -> list[dict[str, Any]]:
        """One dict for each run of each rule."""
        return [run for outcome in self.outcomes for run in outcome.runs()]

    @property
    def best(self) -> dict[str, Any]:
        """The row of the rule with the lowest final loss."""
        return self.rows[0]

    def table(self) -> str:
        """The rows as text."""
        return text(self.task, self.outcomes)

    def data(self) -> dict[str, Any]:
        """Everything as numbers for JSON: rows, runs, and the curves of the best rates."""
        curves = {}
        for outcome in self.outcomes:
            if outcome.best is not None:
                steps, losses = outcome.curve(outcome.best)
                curve: dict[str, Any] = {"steps": steps.tolist(), "losses": losses.T.tolist()}
                for name in outcome.statistics:
                    curve.setdefault("statistics", {})[name] = outcome.curve(outcome.best, name)[1].T.tolist()
                curves[outcome.label] = curve
        return {"task": self.task, "rules": self.rows, "runs": self.runs, "curves": curves}

    def json(self, path: str | Path | None = None) -> str:
        """`data()` as JSON, written to a file too where a path is named; a number that is not finite is null."""
        return _written(path, json.dumps(_finite(self.data()), indent=1, allow_nan=False) + "\n")

    def csv(self, path: str | Path | None = None) -> str:
        """The runs as CSV, a line for each, written to a file too where a path is named."""
        buffer = io.StringIO()
        writer = csv.DictWriter(buffer, [*self.runs[0]], lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.runs)
        return _written(path, buffer.getvalue())

    def html(self, path: str | Path) -> None:
        """Writes a page with the table and interactive plots, all in one file; RulecError without plotly."""
        _written(path, page(self.task, self.outcomes))

    def to_frame(self) -> Any:
        """The runs as a data frame of pandas; RulecError where pandas is not installed."""
        try:
            import pandas as pd
        except ImportError:
            raise RulecError("to_frame() needs pandas: pip install pandas, or use rows and runs") from None
        return pd.DataFrame(self.runs)

    def __repr__(self) -> str:
        return self.table()

    def _repr_html_(self) -> str:
        return html_table(self.task, self.outcomes)


def _finite(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, list):
        return [_finite(value) for value in data]
    return number(data) if isinstance(data, float) else data


def _written(path: str | Path | None, text: str) -> str:
    """The text, written to a file where there is a path; RulecError where that cannot be done."""
    if path is not None:
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).write_text(text, encoding="utf-8")
        except OSError as error:
            raise RulecError(f"{path} cannot be written: {error.strerror or error}") from None
    return text
