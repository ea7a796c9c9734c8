"""Kinds of sentences that a reader must read twice, each with the pattern that recognises it.

`python -m tests.words docs` lists such sentences of the pages, `python -m tests.words FOLDER` those of docstrings.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_IS, _HAS = "is|are|was|were", "has|have|had"

#: The largest number of words in a sentence.
LONGEST = 40


@dataclass(frozen=True)
class Kind:
    """A kind of sentence, as a pattern of it, with the advice to its author."""

    name: str
    pattern: re.Pattern[str]
    advice: str


def _kind(name: str, pattern: str, advice: str) -> Kind:
    return Kind(name, re.compile(pattern), advice)


KINDS = (
    _kind("ends on a negation", rf"\b({_HAS}) not[.;:]|\b({_IS}|{_HAS}) none[.;:]", "repeat the verb or the noun"),
    _kind("none as a noun", rf"\bnone,? too\b|\b(there|it|which) ({_IS}) none\b", "say zero, no, or the noun"),
    _kind("one as a noun", r"\b(is|are) one (in|of) all\b", "repeat the noun"),
    _kind("possessive without noun", r"\b(theirs|ours)\b|[a-zA-Z]'s([.;:]| (is|are|goes|does|has)\b)", "name the noun"),
    _kind("nothing as a subject", rf"[,;] (then |and |and then )?nothing ({_IS}|has been)\b", "say who leaves what"),
    _kind("where as a condition", r"^Where (?!to )[^?:]*,(?! and )", "begin with if, or with when"),
    _kind("for as because", r"[,;] for (it|they|there|nothing|neither)\b", "write because"),
    _kind("but for", r"\bbut for\b", "write except"),
    _kind(
        "that upon that", r"\bby that[.;:]|\b(agree|know\w*) by\b|\bthat\b[^,;:]*\bthat\b[^,;:]*\bthat\b", "divide it"
    ),
)

LONG = Kind("long", re.compile(""), f"at most {LONGEST} words, numbers not counted")

_WORD = re.compile(r"(?:^|[\s(\"*-])[A-Za-z`][\w'`]*")

#: Parts of a page that are no sentences: code, tables, headings, comments, pictures.
_NO_PROSE = ("|", "#", "<", "![", "    ")


def _paragraphs(text: str) -> Iterator[str]:
    lines, code = [], False
    for line in text.splitlines():
        fence = line.lstrip().startswith("```")
        code ^= fence
        item = re.match(r"\s*(?:-|\d+\.) ", line)
        if fence or code or (line.startswith(_NO_PROSE) and not item):
            lines.append("")
        else:
            lines.extend(["", line[item.end() :]] if item else [line])
    yield from (" ".join(part.split()) for part in re.split(r"\n\s*\n", "\n".join(lines)))


def plain(text: str) -> str:
    """A text with a letter for each piece of code, and the words of each link."""
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", re.sub(r"`[^`]*`", "`x`", text))


def sentences_of(page: str) -> Iterator[str]:
    """The sentences of a page in Markdown, without code blocks, tables and headings."""
    for paragraph in _paragraphs(page):
        closed = re.sub(r"`[^`]*`|\[[^\]]*\]\([^)]*\)", lambda piece: piece[0].replace(" ", "\0"), paragraph)
        yield from (part.replace("\0", " ") for part in re.split(r"(?<=[.!?])\s+", closed) if part)


def faults(sentence: str) -> Iterator[Kind]:
    """The kinds that a sentence is of."""
    words = plain(sentence)
    for kind in KINDS:
        clauses = [words] if kind.name.startswith(("that", "for", "nothing")) else re.split(r"(?<=[.;:])\s", words)
        if any(kind.pattern.search(clause) for clause in clauses):
            yield kind
    if len(_WORD.findall(words)) > LONGEST:
        yield LONG


def listed(page: Path) -> Iterator[str]:
    """Each sentence of a page that is of a kind, with the kind and the advice."""
    for sentence in sentences_of(page.read_text(encoding="utf-8")):
        yield from (f"{kind.name} ({kind.advice}): {sentence}" for kind in faults(sentence))
