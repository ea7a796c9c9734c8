"""The answer of an analysis: yes with a proof, no with a counterexample, or unknown, and the line that decides."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from rulec.language.source import Span

Answer = Literal["yes", "no", "unknown"]


@dataclass(frozen=True)
class Line:
    """A line of a step as text, and its place where the rule was read from a file."""

    text: str
    span: Span | None = field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        return f"`{self.text}`"


@dataclass(frozen=True)
class Fact:
    """One answer about a rule, and why.

    `yes` is proved from the expressions, under the conditions in `where`, such as `eps = 0`. `no` is refuted by a
    counterexample in numbers. `unknown` is neither. `line` is the line where the property comes to hold, or where the
    proof ends. The proofs are about real numbers: rounding, overflow and infinite gradients are outside of them. As a
    truth value, a Fact is true only for a yes without conditions.
    """

    answer: Answer
    why: str = ""
    where: tuple[str, ...] = ()
    line: Line | None = None

    def __bool__(self) -> bool:
        return self.answer == "yes" and not self.where

    def __str__(self) -> str:
        head = f"where {' and '.join(self.where)}" if self.where else self.answer
        reason = " ".join(x for x in (self.why, str(self.line) if self.line else "") if x)
        return f"{head}: {reason}" if reason else head
