"""One file of several runs: a part's run takes the place of that part's rows and notes, and of nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from benchmarks.gpu.names import PARTS
from benchmarks.result import Record, Result
from rulec.errors import RulecError

_ORDER = {name: number for number, name in enumerate(("", *PARTS))}


def check(before: Result, where: str, quick: bool, rules: Sequence[str], name: str = "gpu") -> None:
    """RulecError, before anything is measured, where the results to come may not stand beside those in a file.

    `name` is that of the results to come.
    """
    if before.name != name:
        raise RulecError(f"{where} has results of {before.name}: give rulec bench gpu another --json")
    if before.quick != quick:
        kind, other = ("quick", "full") if before.quick else ("full", "quick")
        raise RulecError(
            f"{where} has results of a {kind} run, and a {other} run has no place in it: give another --json"
        )
    restricted = {tuple(one.rules) for one in before.parts.values()} or {()}
    if restricted != {tuple(rules)}:
        of = " and ".join(", ".join(one) or "all rules" for one in sorted(restricted))
        raise RulecError(
            f"{where} has results of {of}, and this run is of {', '.join(rules) or 'all rules'}: give another --json"
        )


def merged(before: Result, after: Result) -> Result:
    """The results of a file with those of a new run.

    A part keeps its rows where it did not run this time. Rows without a part are of a file from before there were
    parts: each stays until a row that says the same is measured, and the file's machine, date and notes are theirs.
    """
    ran = {name for name, one in after.parts.items() if one.ran}
    said = {row.what for row in after.rows}
    kept = [row for row in before.rows if row.part not in ran and (row.part or row.what not in said)]
    rows = sorted([*kept, *after.rows], key=lambda row: _place(row.part))
    older = any(not row.part for row in kept)
    return replace(before if older else after, rows=rows, parts=_records(before, after), quick=after.quick)


def _place(part: str) -> int:
    return _ORDER.get(part, len(_ORDER))


def _records(before: Result, after: Result) -> dict[str, Record]:
    done = {name for name, one in before.parts.items() if one.ran}
    fresh = {name: one for name, one in after.parts.items() if one.ran or name not in done}
    return dict(sorted({**before.parts, **fresh}.items(), key=lambda item: _place(item[0])))


def measured_parts(result: Result) -> list[str]:
    """The parts of which a run is recorded, also of a file from before there were records."""
    seconds = result.machine.get("seconds", {}) if any(not row.part for row in result.rows) else {}
    before = {_FORMER.get(name, name) for name in seconds}
    return [name for name in PARTS if name in before or (name in result.parts and result.parts[name].ran)]


#: Former name -> name, of parts in a file from before there were records.
_FORMER = {"reducing rules": "reductions", "other ways": "ways"}
