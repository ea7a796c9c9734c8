"""The results of a measurement: rows with their targets, to and from JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import Any, Literal

from rulec.errors import RulecError
from rulec.tools.compare.measure import facts


@dataclass(frozen=True)
class Row:
    """One figure: the `measure` of a `subject`, a ratio or a number with a `unit`.

    `sense` is the side of `target` on which it should be: `at least` or `at most`. `detail` has the numbers behind it,
    times in seconds. `part` is the name of the part of a measurement, where it has parts that run by themselves.
    """

    subject: str
    measure: str
    value: float
    target: float | None = None
    sense: Literal["at least", "at most"] = "at least"
    unit: str = ""
    detail: Mapping[str, Any] = field(default_factory=dict)
    part: str = ""

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
class Record:
    """One run of a part of a measurement: its machine, its date, its seconds, and what it left out.

    `rules` are the rules to which it was restricted. If it did not run, for want of time or of a package, `ran` is
    false and the notes say why.
    """

    ran: bool
    seconds: float
    notes: list[str] = field(default_factory=list)
    rules: list[str] = field(default_factory=list)
    machine: Mapping[str, Any] = field(default_factory=facts)
    measured: str = field(default_factory=lambda: date.today().isoformat())


@dataclass(frozen=True)
class Result:
    """The rows of one measurement, and the machine, versions and threads of the run.

    With `quick` sizes were too small for the figures to count. `notes` name all that was left out, with the reason.
    `parts` has a record for each part that runs by itself; `machine`, `measured` and `notes` are then of rows without a
    part.
    """

    name: str
    rows: list[Row]
    quick: bool
    threads: int
    notes: list[str] = field(default_factory=list)
    machine: Mapping[str, Any] = field(default_factory=facts)
    measured: str = field(default_factory=lambda: date.today().isoformat())
    parts: Mapping[str, Record] = field(default_factory=dict)

    @property
    def remarks(self) -> list[str]:
        """All notes, each once: of the measurement, then of its parts."""
        return list(dict.fromkeys([*self.notes, *(note for one in self.parts.values() for note in one.notes)]))

    def data(self) -> dict[str, Any]:
        """The result as plain data; a measurement without parts says nothing of them."""
        data = asdict(self)
        data["rows"] = [_plain(row) for row in self.rows]
        if not self.parts:
            del data["parts"]
        return data


def _plain(row: Row) -> dict[str, Any]:
    data = {**asdict(row), "met": row.met}
    if not row.part:
        del data["part"]
    return data


def read_result(path: Path) -> Result:
    """The result in a JSON file; RulecError where the file is another."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        rows = [Row(**{k: v for k, v in row.items() if k != "met"}) for row in data.pop("rows")]
        parts = {name: Record(**one) for name, one in data.pop("parts", {}).items()}
        return Result(rows=rows, parts=parts, **data)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise RulecError(f"{path} is no benchmark result: {error}") from error
