"""What a measurement on a GPU is made of: parts with a limit on their time, and what they find."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from benchmarks.result import Row
from rulec.errors import RulecError


@dataclass(frozen=True)
class Note:
    """Something to be said about the measurement that is no figure."""

    text: str


@dataclass(frozen=True)
class Checked:
    """How a rule did against the float64 reference; `kind` says what sort of rules it is counted among.

    `difference` is the largest there was after one step, relative to the largest number of its tensor. `fault` says in
    a sentence what is wrong, `refused` why the backend does not run the rule.
    """

    backend: str
    rule: str
    dtype: str
    difference: float = 0.0
    fault: str | None = None
    refused: str | None = None
    kind: str = "rules"


Found: TypeAlias = Row | Note | Checked


@dataclass(frozen=True)
class Part:
    """A piece of work for one process: `work(bench, *arguments)` yields what it finds as it finds it.

    `work` is a function of a module, so that it can be named to another process. The part is ended after `seconds`,
    and not begun with less than `least` left.
    """

    name: str
    work: Callable[..., Iterator[Found]]
    arguments: tuple[Any, ...] = ()
    seconds: float = 60.0
    least: float = 3.0


@dataclass(frozen=True)
class Section:
    """Parts that share a limit on their time, in the order in which they matter.

    `together` says that several may run at once: they time nothing.
    """

    name: str
    parts: Sequence[Part]
    seconds: float
    together: bool = False


@dataclass
class Findings:
    """What was found so far; the notes have what failed and what was not run."""

    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    checked: list[Checked] = field(default_factory=list)

    def add(self, found: Found) -> None:
        """Takes what a part found."""
        if isinstance(found, Row):
            self.rows.append(found)
        elif isinstance(found, Note):
            self.say(found.text)
        else:
            self.checked.append(found)

    def say(self, note: str) -> None:
        """Adds a note, unless it is there already."""
        if note not in self.notes:
            self.notes.append(note)

    def correctness(self) -> list[Row]:
        """A row for each backend, dtype and kind: how many agree with the reference, of those that were compared."""
        found: dict[tuple[str, str, str], list[Checked]] = {}
        for one in self.checked:
            found.setdefault((one.backend, one.kind, one.dtype), []).append(one)
        return [_agreement(f"{backend}, {dtype}", kind, all_) for (backend, kind, dtype), all_ in sorted(found.items())]


def _agreement(subject: str, kind: str, checked: Sequence[Checked]) -> Row:
    run = [one for one in checked if one.refused is None]
    agreeing = {one.rule: one.difference for one in run if one.fault is None}
    detail = {
        "largest difference": agreeing,
        "failed": {one.rule: one.fault for one in run if one.fault is not None},
        "refused": {one.rule: one.refused for one in checked if one.refused is not None},
    }
    return Row(subject, f"{kind} that agree with the float64 reference", len(agreeing), len(run), detail=detail)


def sentence(error: BaseException) -> str:
    """An error in one line: what a rule or a peer raised, by its kind where it is not ours."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0][:400] if lines else "no message"
    return text if isinstance(error, RulecError | AssertionError) else f"{type(error).__name__}: {text}"
