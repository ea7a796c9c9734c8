"""The results of a measurement: rows with their targets, to and from JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import Any, Literal

from rulec.compare.machine import facts
from rulec.errors import RulecError


@dataclass(frozen=True)
class Row:
    """One figure: the `measure` of a `subject`, a ratio or a number with a `unit`.

    `sense` is the side of `target` on which it should be: `at least` or `at most`. `detail` has the numbers behind it,
    times in seconds.
    """

    subject: str
    measure: str
    value: float
    target: float | None = None
    sense: Literal["at least", "at most"] = "at least"
    unit: str = ""
    detail: Mapping[str, Any] = field(default_factory=dict)

    @property
    def what(self) -> str:
        """Subject and measure in one line."""
        return f"{self.subject}: {self.measure}"

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None where there is none."""
        if self.target is None:
            return None
        return self.value >= self.target if self.sense == "at least" else self.value <= self.target


@dataclass(frozen=True)
class Result:
    """The rows of one measurement, and the machine, versions and threads of the run.

    With `quick` sizes were too small for the figures to count. `notes` name all that was left out, with the reason.
    """

    name: str
    rows: list[Row]
    quick: bool
    threads: int
    notes: list[str] = field(default_factory=list)
    machine: Mapping[str, Any] = field(default_factory=facts)
    measured: str = field(default_factory=lambda: date.today().isoformat())

    def data(self) -> dict[str, Any]:
        """The result as plain data."""
        data = asdict(self)
        data["rows"] = [{**asdict(row), "met": row.met} for row in self.rows]
        return data


def read_result(path: Path) -> Result:
    """The result in a JSON file; RulecError where the file is another."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        rows = [Row(**{k: v for k, v in row.items() if k != "met"}) for row in data.pop("rows")]
        return Result(rows=rows, **data)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise RulecError(f"{path} is no benchmark result: {error}") from error
