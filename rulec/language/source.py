"""Source text and places in it, so that every error can show the line it is about."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass

from rulec.errors import RuleError


@dataclass(frozen=True)
class Source:
    """A text and the name users know it by (a path, or `<string>`)."""

    name: str
    text: str

    def line(self, number: int) -> str:
        """The line with this 1-based number, without its end; empty past the end."""
        lines = self.text.splitlines()
        return lines[number - 1] if 0 < number <= len(lines) else ""


@dataclass(frozen=True)
class Span:
    """A place in a source: 1-based line and column, and how many characters it covers."""

    source: Source
    line: int
    column: int
    width: int = 1

    def __str__(self) -> str:
        return f"{self.source.name}:{self.line}:{self.column}"

    def excerpt(self) -> str:
        """The line itself with a caret under the place."""
        line = self.source.line(self.line)[:200]
        marks = "^" * max(1, min(self.width, len(line) - self.column + 1))
        return f"    {line}\n    {' ' * (self.column - 1)}{marks}"


def rule_error(message: str, span: Span | None = None) -> RuleError:
    """The error for a mistake at `span`, or nowhere in particular."""
    if span is None:
        return RuleError(message)
    return RuleError(message, place=str(span), excerpt=span.excerpt())


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the nearest known name, or nothing where none is near."""
    near = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""
