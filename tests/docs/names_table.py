"""The names of optimizers elsewhere, and what each is here: a rule, rules composed, or what is missing for it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

from rulec.language.library import rules
from tests.docs import peers
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
    """Names of a library; one that the tests do not install has a version, and the day its code was read."""

    names: Mapping[str, Meaning]
    version: str = ""
    read: str = ""
    note: str = ""
    compared: tuple[str, ...] = ()


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
        [f"`{name}`", *_counts(library.names.values()), library.version, library.read]
        for name, library in libraries().items()
    ]
    counts.append(["all", *_counts(every), "", ""])
    head = ["library", "rules", "compositions", "code", "not here", "of these, otherwise there", "version", "read on"]
    parts = [table(head, counts)]
    for name, library in libraries().items():
        parts += _of_library(name, library)
    return "\n\n".join(parts)


def _counts(meanings: Collection[Meaning]) -> list[str]:
    """How many of them are of each kind, and how many are otherwise there."""
    of_kinds = Counter(meaning.kind for meaning in meanings)
    differing = sum(bool(meaning.differs) for meaning in meanings)
    return [*(str(of_kinds[kind]) for kind in ("rule", "composition", "code", "missing")), str(differing)]


def _of_library(name: str, library: Library) -> list[str]:
    """The tables of one library, and the reasons for names that are not here."""
    compared = {n.lower(): "yes" for n in _compared(name)} | {n.lower(): "once" for n in library.compared}
    here = [
        [f"`{n}`", f"`{m.text or m.code}`", "yes" if m.compared else compared.get(n.lower(), ""), m.differs]
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


def _compared(library: str) -> set[str]:
    """The names in a library whose code was compared with a rule."""
    told = " ".join(row["peer"] for row in peers.read()["rows"])
    return set(re.findall(rf"(?<![\w.]){re.escape(library)}\.(\w+)\b(?!\.)", told))


MAKERS = {"other-names": other_names}
