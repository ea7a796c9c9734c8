"""The parts of a measurement on a GPU, each with a limit on its time, and their findings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from benchmarks.result import Row
from rulec.errors import RulecError


@dataclass(frozen=True)
class Note:
    """A remark about the measurement, beside its figures."""

    text: str


#: The kind of `Checked` that is a test of the project: `backend` is what the tests are of, `rule` the test.
TESTS = "tests"


@dataclass(frozen=True)
class Checked:
    """The comparison of a rule with the float64 reference; `kind` is the group of rules in which it counts.

    `difference` is the largest after one step, relative to the largest number of its tensor. `fault` is a sentence
    about a wrong result, `refused` one about the backend's reason not to run the rule.
    """

    backend: str
    rule: str
    dtype: str
    difference: float = 0.0
    fault: str | None = None
    refused: str | None = None
    kind: str = "rules"


Finding: TypeAlias = Row | Note | Checked


@dataclass(frozen=True)
class Part:
    """A piece of work for one process: `work(bench, *arguments)` yields its findings one by one.

    `work` is a function of a module, so that it can be named to another process. The part is ended after `seconds`,
    and not begun with less than `least` left.
    """

    name: str
    work: Callable[..., Iterator[Finding]]
    arguments: tuple[Any, ...] = ()
    seconds: float = 60.0
    least: float = 3.0


@dataclass(frozen=True)
class Section:
    """Pieces of work with a common limit on their time, the most important first.

    `name` is one of `PARTS`; sections of one name belong together, such as compiling and timing. With `together`
    several pieces may run at once: they time nothing. `notes` say what is left out, such as a peer.
    """

    name: str
    parts: Sequence[Part]
    seconds: float
    together: bool = False
    notes: Sequence[str] = ()


@dataclass
class Findings:
    """The findings so far; the notes name parts that failed or did not run."""

    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    checked: list[Checked] = field(default_factory=list)

    def add(self, finding: Finding) -> None:
        """Adds a finding of a part."""
        if isinstance(finding, Row):
            self.rows.append(finding)
        elif isinstance(finding, Note):
            self.say(finding.text)
        else:
            self.checked.append(finding)

    def say(self, note: str) -> None:
        """Adds a note, unless it is there already."""
        if note not in self.notes:
            self.notes.append(note)

    def correctness(self) -> list[Row]:
        """A row for each backend, dtype and kind: how many of the compared rules agree, or of the tests pass."""
        groups: dict[tuple[str, str, str], list[Checked]] = {}
        for one in self.checked:
            groups.setdefault((one.backend, one.kind, one.dtype), []).append(one)
        return [
            _agreement(", ".join(filter(None, (backend, dtype))), kind, checked)
            for (backend, kind, dtype), checked in sorted(groups.items())
        ]


def _agreement(subject: str, kind: str, checked: Sequence[Checked]) -> Row:
    run = [one for one in checked if one.refused is None]
    failed = {one.rule: one.fault for one in run if one.fault is not None}
    agreeing = {one.rule: one.difference for one in run if one.rule not in failed}
    detail: dict[str, Any] = {} if kind == TESTS else {"largest difference": agreeing}
    detail |= {
        "failed": failed,
        "refused": {one.rule: one.refused for one in checked if one.refused is not None},
    }
    measure = "tests that pass" if kind == TESTS else f"{kind} that agree with the float64 reference"
    return Row(subject, measure, len(agreeing), len({one.rule for one in run}), detail=detail)


def sentence(error: BaseException) -> str:
    """An error of a rule or a peer in one line, after the name of its class where it is not ours."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0][:400] if lines else "no message"
    return text if isinstance(error, RulecError | AssertionError) else f"{type(error).__name__}: {text}"
