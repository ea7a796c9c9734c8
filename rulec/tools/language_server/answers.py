"""Answers to an editor about a rule's text: its mistakes with their places, completions, and meanings of words."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

import rulec.math
from rulec.errors import RuleError
from rulec.language.check import unread
from rulec.language.expr.functions import FUNCTIONS
from rulec.language.expr.names import RESERVED, RESULTS
from rulec.language.hyper import Hyper, well_known_range
from rulec.language.library.load import load, parse, rules
from rulec.language.statistics import STORED, UPDATE
from rulec.language.yaml.schema import RuleFile

#: Keys whose value is a text.
_TEXTS = re.compile(r"\s*(name|summary|title|authors|year|url)\s*:")

#: Keys whose value names rules.
_RULES = re.compile(r"\s*(uses|plus|chain|otherwise)\s*:")


@dataclass(frozen=True)
class Word:
    """A word of the language or of a rule: its kind, and what it means in Markdown."""

    name: str
    kind: str
    meaning: str


#: The names that statistics alone may read.
_STATISTICS = {
    UPDATE: Word(UPDATE, "name", "the change of the parameter in this step"),
    STORED: Word(STORED, "name", "the new parameter as its memory keeps it; `p` is the parameter before the step"),
}


def words_at(text: str, line: int, column: int, names: Mapping[str, Word]) -> list[Word]:
    """The words to offer at a place, its line and column from 0; `names` are those of the rule.

    Keys at the beginning of a line, rules where a key asks for some, nothing in texts, elsewhere names and functions;
    under `statistics` also the names of statistics alone, and under `variants` hyper-parameters.
    """
    before = (text.split("\n")[line : line + 1] or [""])[0][:column]
    if re.fullmatch(r"\w*", before):
        return [*_keys().values()]
    if _TEXTS.match(before):
        return []
    if _section(text, line) == "variants" and before.count("[") == before.count("]"):
        return [word for word in names.values() if word.kind == "hyper-parameter" and word.name != "lr"]
    if _RULES.match(before):
        return [*_rules().values()]
    return [*{**names, **_of_statistics(text, line)}.values(), *_language().values()]


def meaning_at(text: str, line: int, column: int, names: Mapping[str, Word]) -> Word | None:
    """The word at a place, its line and column from 0; None where it is no word of the language or the rule."""
    content = (text.split("\n")[line : line + 1] or [""])[0]
    for match in re.finditer(r"[A-Za-z_][\w.]*", content):
        if match.start() <= column <= match.end():
            key = _keys().get(match[0]) if match.start() == 0 else None
            rule = _rules().get(match[0]) if _RULES.match(content) else None
            known = {**_language(), **names, **_of_statistics(text, line)}
            return key or rule or known.get(match[0])
    return None


def _of_statistics(text: str, line: int) -> Mapping[str, Word]:
    """The names of statistics alone, where a line is under the key `statistics`."""
    return _STATISTICS if _section(text, line) == "statistics" else {}


def _section(text: str, line: int) -> str:
    """The key that a line is under; empty above all keys."""
    keys = re.findall(r"^(\w+)\s*:", "\n".join(text.split("\n")[: line + 1]), re.MULTILINE)
    return keys[-1] if keys else ""


def names_of(text: str) -> dict[str, Word]:
    """The hyper-parameters, states, inputs and lines of a rule's text; of broken YAML those of whole sections."""
    data = _data(text)
    sections: Mapping[str, Any] = data if isinstance(data, dict) else _whole_sections(text)
    lines = re.findall(r"^ +([A-Za-z_]\w*) *= *(.+)$", text, re.MULTILINE)
    names = {name: Word(name, "line", f"`{name} = {value}`") for name, value in lines}
    for section, kind in (("hyper", "hyper-parameter"), ("state", "state"), ("inputs", "input")):
        entries = sections.get(section)
        for name, value in entries.items() if isinstance(entries, dict) else ():
            names[str(name)] = Word(str(name), kind, _declared(str(name), kind, value))
    return names


def _whole_sections(text: str) -> dict[str, Any]:
    """The data of the sections of broken YAML, where a section alone is YAML."""
    sections: dict[str, Any] = {}
    for section in re.findall(r"^\w+ *:.*(?:\n .*)*", text, re.MULTILINE):
        data = _data(section)
        sections |= data if isinstance(data, dict) else {}
    return sections


def _data(text: str) -> Any:
    """The data of YAML; None for broken YAML, and for aliases, which may stand for more text than memory holds."""
    try:
        aliases = any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, yaml.SafeLoader))
        return None if aliases else yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        return None


def _declared(name: str, kind: str, value: Any) -> str:
    limits = Hyper(None, **well_known_range(name)).range_text() if kind == "hyper-parameter" else ""
    return f"{kind} `{name}`: {value}" + (f"; {limits}" if limits else "")


@cache
def _language() -> dict[str, Word]:
    functions = {
        name: Word(name, "function", f"```python\n{function.signature()}\n```\n{getattr(rulec.math, name).__doc__}")
        for name, function in FUNCTIONS.items()
    }
    return functions | {name: Word(name, "name", text) for name, text in (RESERVED | RESULTS).items()}


@cache
def _keys() -> dict[str, Word]:
    fields = {field.alias or name: field.description for name, field in RuleFile.model_fields.items()}
    return {name: Word(name, "key", text or "") for name, text in fields.items()}


@cache
def _rules() -> dict[str, Word]:
    words = {}
    for name in rules():
        try:
            rule = load(name)
        except RuleError:  # of an installed package
            continue
        short = name.rpartition("/")[2]
        words[short] = Word(short, "rule", f"**{rule.name}**: {rule.summary}\n```\n{rule.step_text()}\n```")
    return words


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
