"""The names of optimizers elsewhere, and what each is here: a rule, rules composed, or what is missing for it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import yaml

from rulec.language.library import rules
from tests.docs import peers
from tests.docs.table import table

FILE = Path(__file__).with_name("names.yaml")

#: What a name is here: text that composes rules; `{code: NAME}` for code of rulec, with `compared` for a test beside
#: that of the library; or `{missing: ...}`.
Meaning = str | Mapping[str, str]


@cache
def names() -> Mapping[str, Mapping[str, Meaning]]:
    """Library -> name there -> its meaning here."""
    found: Mapping[str, Mapping[str, Meaning]] = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    return found


def kind(meaning: Meaning) -> str:
    """`rule`, `composition`, `code` or `missing`."""
    if not isinstance(meaning, str):
        return "code" if "code" in meaning else "missing"
    return "rule" if meaning in rules() or f"transforms/{meaning}" in rules() else "composition"


def other_names() -> str:
    """How many names of each library are here, and all of them."""
    kinds = ("rule", "composition", "code", "missing")
    counts = [
        [f"`{library}`", *(sum(kind(meaning) == k for meaning in meanings.values()) for k in kinds)]
        for library, meanings in names().items()
    ]
    parts = [table(["library", "rules", "compositions", "code", "not here"], [[str(c) for c in row] for row in counts])]
    for library, meanings in names().items():
        compared = _compared(library)
        here = [
            [f"`{name}`", f"`{_here(meaning)}`", "yes" if name.lower() in compared or "compared" in meaning else ""]
            for name, meaning in meanings.items() if _here(meaning)
        ]  # fmt: skip
        parts.append(table([f"`{library}`", "here", "compared with this code"], here))
        reasons: dict[str, list[str]] = {}
        for name, meaning in meanings.items():
            if not isinstance(meaning, str) and "missing" in meaning:
                reasons.setdefault(meaning["missing"], []).append(f"`{name}`")
        lines = [f"- {reason}: {', '.join(reasons[reason])}" for reason in sorted(reasons)]
        parts += [f"Not here, with what is missing for it:\n\n{chr(10).join(lines)}"] if lines else []
    return "\n\n".join(parts)


def _here(meaning: Meaning) -> str:
    """The rule, the composition or the code; empty where a name is missing."""
    return meaning if isinstance(meaning, str) else meaning.get("code", "")


def _compared(library: str) -> set[str]:
    """The names in a library whose code was compared with a rule, in small letters."""
    told = " ".join(row["peer"] for row in peers.read()["rows"])
    return {name.lower() for name in re.findall(rf"(?<![\w.]){re.escape(library)}\.(\w+)\b(?!\.)", told)}


MAKERS = {"other-names": other_names}
