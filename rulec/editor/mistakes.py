"""The mistakes of a text, with their places."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from rulec.errors import RuleError
from rulec.language.library import parse


@dataclass(frozen=True)
class Mistake:
    """A mistake: its sentence, its line and first column from 0, its width in characters, and its kind."""

    message: str
    line: int
    column: int
    width: int
    code: str = RuleError.code


def mistakes(text: str, folder: Path | None = None) -> list[Mistake]:
    """All mistakes of a rule's YAML text, in the order of the text; empty for a rule.

    Rules named by a path are looked up from `folder`.
    """
    try:
        parse(text, "rule", folder)
    except RuleError as error:
        return sorted((_placed(each) for each in (error, *error.others)), key=lambda each: (each.line, each.column))
    return []


def _placed(error: RuleError) -> Mistake:
    """A mistake of another file, or of none, is shown at the beginning."""
    where = re.fullmatch(r"rule:(\d+):(\d+)", error.place)
    if where is None:
        return Mistake(str(error).partition("\n")[0], 0, 0, 1, error.code)
    carets = str(error).rpartition("\n")[2].count("^")
    return Mistake(error.message, int(where[1]) - 1, int(where[2]) - 1, max(1, carets), error.code)
