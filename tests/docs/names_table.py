"""The names of optimizers elsewhere, and what each is here: a rule, rules composed, or what is missing for it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from gallery.compared import FLOAT32, subjects, unchanged
from rulec.language.library.load import rules
from tests.docs import peers
from tests.docs.rule_tables import FACTORED, of_factors
from tests.docs.table import table

FILE = Path(__file__).with_name("names.yaml")
ELSEWHERE = Path(__file__).with_name("names_elsewhere.yaml")


@dataclass(frozen=True)
class Meaning:
    """What a name is here: text that composes rules, or code of rulec, or what is missing.

    `differs` is what the library's code does otherwise, `compared` a test of code of rulec beside it.
    """

    text: str = ""
    code: str = ""
    compared: str = ""
    differs: str = ""
    missing: str = ""

    @property
    def kind(self) -> str:
        """`rule`, `composition`, `code` or `missing`."""
        if not self.text:
            return "code" if self.code else "missing"
        return "rule" if self.text in rules() or f"transforms/{self.text}" in rules() else "composition"


@dataclass(frozen=True)
class Library:
    """Names of a library; one that the tests do not install has a version, and the day its code was read.

    `package` is its name in pip's index, where it is there.
    """

    names: Mapping[str, Meaning]
    version: str = ""
    read: str = ""
    note: str = ""
    compared: tuple[str, ...] = ()
    package: str = ""


@cache
def libraries() -> Mapping[str, Library]:
    """All libraries by name: those installed, then the others."""
    installed = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    found = {library: Library(_meanings(names)) for library, names in installed.items()}
    for library, entry in yaml.safe_load(ELSEWHERE.read_text(encoding="utf-8")).items():
        facts = {**entry, "version": str(entry["version"]), "read": str(entry["read"])}
        facts |= {"names": _meanings(entry["names"]), "compared": tuple(entry.get("compared", ()))}
        found[library] = Library(**facts)
    return found


def _meanings(names: Mapping[str, str | Mapping[str, str]]) -> Mapping[str, Meaning]:
    return {name: _meaning(**{"is": value} if isinstance(value, str) else value) for name, value in names.items()}


def _meaning(**keys: str) -> Meaning:
    return Meaning(keys.pop("is", ""), **keys)


def other_names() -> str:
    """How many names of each library are here, of all of them together, and then every name."""
    every = [meaning for library in libraries().values() for meaning in library.names.values()]
    counts = [
        [f"`{name}`", *_counts(library.names.values()), library.version or _installed(name), library.read or "by tests"]
        for name, library in libraries().items()
    ]
    counts.append(["all", *_counts(every), "", ""])
    head = ["library", "rules", "compositions", "code", "not here", "of these, otherwise there", "version", "read on"]
    parts = [table(head, counts)]
    for name, library in libraries().items():
        parts += _of_library(name, library)
    return "\n\n".join(parts)


def _installed(name: str) -> str:
    """The version of a library that the tests install, with which the rows were measured."""
    written: Mapping[str, str] = peers.read()["versions"]
    return written[name.partition(".")[0]].partition("+")[0]


def _counts(meanings: Collection[Meaning]) -> list[str]:
    """How many of them are of each kind, and how many are otherwise there."""
    of_kinds = Counter(meaning.kind for meaning in meanings)
    differing = sum(bool(meaning.differs) for meaning in meanings)
    return [*(str(of_kinds[kind]) for kind in ("rule", "composition", "code", "missing")), str(differing)]


def _of_library(name: str, library: Library) -> list[str]:
    """The tables of one library, and the reasons for names that are not here."""
    rows = _compared(name)
    rows |= {n.lower(): _about(m.text, rows[n.lower()]) for n, m in library.names.items() if n.lower() in rows}
    compared = {n: "yes" if _as_called(each) else "changed" for n, each in rows.items()}
    compared |= {n.lower(): "once" for n in library.compared}
    here = [
        [f"`{n}`", f"`{m.text or m.code}`", "yes" if m.compared else compared.get(n.lower(), ""),
         m.differs or _otherwise(m.text, rows.get(n.lower(), []))]
        for n, m in library.names.items() if not m.missing
    ]  # fmt: skip
    parts = [library.note] if library.note else []
    parts.append(table([f"`{name}`", "here", "compared with this code", "what it does otherwise"], here))
    reasons: dict[str, list[str]] = {}
    for n, m in library.names.items():
        if m.missing:
            reasons.setdefault(m.missing, []).append(f"`{n}`")
    lines = [f"- {reason}: {', '.join(reasons[reason])}" for reason in sorted(reasons)]
    return [*parts, *([f"Not here, with what is missing for it:\n\n{chr(10).join(lines)}"] if lines else [])]


def _compared(library: str) -> dict[str, list[Mapping[str, Any]]]:
    """The names in a library whose code was compared with a rule, in small letters, with the comparisons."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for row in peers.read()["rows"]:
        for name in set(re.findall(rf"(?<![\w.]){re.escape(library)}\.(\w+)\b(?!\.)", row["peer"])):
            found.setdefault(name.lower(), []).append(row)
    return found


def _about(text: str, rows: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The comparisons of the rules that a name is here, where there are any."""
    rules = set(subjects(text)) if text else set()
    return [row for row in rows if rules & {*subjects(row["rule"])}] or rows


def _as_called(rows: Collection[Mapping[str, Any]]) -> bool:
    """Whether a comparison has their code as its users call it, or agrees with it to the rounding of float32."""
    return any(
        all(value is not None and value < FLOAT32 for value in row["called"].values())
        if "called" in row
        else not row.get("remark", "").startswith("theirs ")
        for row in rows
    )


def _otherwise(text: str, rows: Collection[Mapping[str, Any]]) -> str:
    """What a rule does otherwise than code that a comparison changes."""
    if not rows or _as_called(rows):
        return ""
    factors = [of_factors(text)] if text in FACTORED["rules"] else []
    apart = (f"apart by {unchanged(row)}" if "called" in row else row["remark"] for row in rows)
    return "; ".join([*factors, *dict.fromkeys(apart)])


MAKERS = {"other-names": other_names}
