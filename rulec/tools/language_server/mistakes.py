"""The mistakes of a text, with their places."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from rulec.errors import RuleError
from rulec.language.check import unread
from rulec.language.library.load import parse


@dataclass(frozen=True)
class Mistake:
    """A mistake: its sentence, its line and first column from 0, its width in characters, and its kind.

    A rule with no other mistakes than warnings is a rule.
    """

    message: str
    line: int
    column: int
    width: int
    code: str = RuleError.code
    warning: bool = False


def mistakes(text: str, folder: Path | None = None) -> list[Mistake]:
    """All mistakes of a rule's YAML text, in the order of the text; for a rule its warnings.

    Rules named by a path are looked up from `folder`.
    """
    try:
        rule = parse(text, "rule", folder)
    except RuleError as error:
        return sorted((_placed(each) for each in (error, *error.others)), key=lambda each: (each.line, each.column))
    return [_placed(each, warning=True) for each in unread(rule)]


def _placed(error: RuleError, warning: bool = False) -> Mistake:
    """A mistake of another file, or of none, is shown at the beginning."""
    where = re.fullmatch(r"rule:(\d+):(\d+)", error.place)
    if where is None:
        return Mistake(str(error).partition("\n")[0], 0, 0, 1, error.code, warning)
    carets = str(error).rpartition("\n")[2].count("^")
    return Mistake(error.message, int(where[1]) - 1, int(where[2]) - 1, max(1, carets), error.code, warning)
