"""Source text and positions in it, so that every error can show its line, and all errors of a text at once.

Reading goes on after each error.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from rulec.errors import RuleError

#: The most characters of a rule file.
MAX_DOCUMENT = 100_000

#: How much of a long line an excerpt shows, in characters.
_WIDTH = 160


@dataclass(frozen=True)
class Source:
    """A text and its name for users (a path, or `<string>`). Its lines end in a line feed."""

    name: str
    text: str

    def line(self, number: int) -> str:
        """The line with this 1-based number, without its end; empty past the end."""
        lines = self.text.split("\n")
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
        """The line with a caret under the place; of a long line the part around it; empty for an empty line."""
        line = self.source.line(self.line)
        if not line.strip():
            return ""
        start = max(0, self.column - 1 - _WIDTH // 2) if len(line) > _WIDTH else 0
        shown = "".join(c if c.isprintable() else "→" if c == "\t" else "�" for c in line[start : start + _WIDTH])
        offset = self.column - 1 - start
        marks = "^" * max(1, min(self.width, len(shown) - offset))
        return f"    {shown}\n    {' ' * offset}{marks}"


def rule_error(message: str, span: Span | None = None, code: str = RuleError.code) -> RuleError:
    """The RuleError for a mistake at `span`, or one without a place."""
    error = RuleError(message) if span is None else RuleError(message, place=str(span), excerpt=span.excerpt())
    error.code = code
    return error


@contextmanager
def of_kind(code: str) -> Iterator[None]:
    """Gives a code to the RuleErrors inside that have none yet; a decorator too."""
    try:
        yield
    except RuleError as error:
        for each in (error, *error.others):
            each.code = code if each.code == RuleError.code else each.code
        raise


#: Words of several libraries for one hyper-parameter.
_SAME = (("lr", "learning_rate"), ("beta1", "b1", "beta_1", "betas"), ("beta2", "b2", "beta_2", "betas"))


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` for a known name of the same meaning, or the nearest; empty where no name is near."""
    if len(name) > 100:
        return ""
    known = {*known}
    for words in _SAME:
        same = [word for word in words if word in known]
        if name in words and same:
            return f"; did you mean {same[0]!r}?"
    candidates = sorted(k for k in known if abs(len(k) - len(name)) <= 20)[:1000]
    near = difflib.get_close_matches(name, candidates, n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else ""


T = TypeVar("T")


class Mistakes:
    """The mistakes of one text so far, one for each place."""

    def __init__(self) -> None:
        self._errors: dict[str, RuleError] = {}

    @contextmanager
    def part(self) -> Iterator[None]:
        """Reads a part of the text; a RuleError with a place is kept, and what follows is read as well."""
        try:
            yield
        except RuleError as error:
            if not error.place:
                raise
            for each in (error, *error.others):
                self._errors.setdefault(each.place, each)

    def read(self, keys: Iterable[str], values: Callable[[str], Mapping[str, T]], instead: T) -> dict[str, T]:
        """The values of all keys; `instead` is the value of a key with a mistake."""
        read: dict[str, T] = {}
        for key in keys:
            with self.part():
                read |= values(key)
                continue
            read[key] = instead
        return read

    def check(self) -> None:
        """Raises the first mistake, with the others in it; does nothing where there is none."""
        if self._errors:
            first, *others = self._errors.values()
            first.others = tuple(others)
            raise first
