"""How plainly the project speaks: sentences to be guessed, and names that say nothing, in each folder.

`make words` prints the counts; `python -m tests.words FOLDER` lists those of a folder, of `docs` those of the pages.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path

from tests.sentences import faults, listed
from tests.shape import files
from tests.test_layering import ROOT

#: Words for something that is not named. A sentence with several of them has to be guessed.
POINTING = re.compile(r"\b(that|which|what|whose|those|these)\b", re.IGNORECASE)

#: Participles in the place of a noun of the field.
VAGUE = frozenset({"found", "own", "given", "made"})

#: The beginning of a short sentence that has no subject: "For all sizes.", "By torch.".
_BARE = re.compile(r"(Of|For|In|On|With|Without|By|From|To|At|As|Else|True of|None for|Nothing in)\b[^,:;]*\.")

#: Words that make a sentence of what stands behind a preposition: a verb, or a pronoun before one.
_VERB = re.compile(r"\b(is|are|was|were|has|have|had|be|does|do|may|must|can|cannot|will|it|they|holds|step goes)\b")

#: Names of classes and functions that were left behind for terms of the field.
LEFT_BEHIND = frozenset({
    "Between", "Cargo", "Census", "Delegated", "Delegation", "Delegations", "Halves", "Meeting", "MeshPeers", "Parcel",
    "PortionValues", "Residence", "Roster", "SkippedThere", "Surroundings", "Told", "Totals", "Turns", "WholeValues",
    "_all_peers", "_meeting_peers", "_peers_along", "check_placed", "first_meeting_of", "in_turn", "is_placed",
    "knows_only_there", "meeting_of", "residence_of", "totals_of", "turn_of",
})  # fmt: skip

#: Names of checks: of helpers, of NumPy, torch and unittest.mock, and of pytest.
_CHECKING = re.compile(r"_?(check|assert|verify)|(raises|warns|fail)$")

_DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@cache
def sentences(file: Path) -> tuple[str, ...]:
    """The sentences of a module's docstrings."""
    texts = [
        ast.get_docstring(item) or "" for item in ast.walk(ast.parse(file.read_text())) if isinstance(item, _DOCUMENTED)
    ]
    parts = [part for text in texts for part in re.split(r"(?<=[.!?])\s+|\n\s*\n", text)]
    return tuple(" ".join(part.split()) for part in parts if part.strip())


def obscure(file: Path) -> Iterator[str]:
    """The sentences with two or more words that point at something unnamed."""
    return (sentence for sentence in sentences(file) if len(POINTING.findall(sentence)) > 1)


def bare(file: Path) -> Iterator[str]:
    """The short sentences without a subject or a verb."""
    for sentence in sentences(file):
        if len(sentence.split()) <= 8 and _BARE.fullmatch(sentence) and not _VERB.search(sentence):
            yield sentence


def read_twice(file: Path) -> Iterator[str]:
    """The sentences of a kind that a reader must read twice, each with its kind and the advice."""
    for sentence in sentences(file):
        yield from (f"{kind.name} ({kind.advice}): {sentence}" for kind in faults(sentence))


def left_behind(file: Path) -> Iterator[str]:
    """Each place where a class, a function or an import has a name that was left behind."""
    for item in ast.walk(ast.parse(file.read_text())):
        name = {ast.Name: "id", ast.ClassDef: "name", ast.FunctionDef: "name", ast.alias: "name"}.get(type(item))
        if name and getattr(item, name) in LEFT_BEHIND:
            yield f"line {item.lineno}: {getattr(item, name)}"  # type: ignore[attr-defined]


def vague(file: Path) -> Iterator[str]:
    """Each place where a variable, a parameter or a member has a participle as its name."""
    for item in ast.walk(ast.parse(file.read_text())):
        name = {ast.Name: "id", ast.arg: "arg", ast.Attribute: "attr", ast.keyword: "arg"}.get(type(item))
        if name and str(getattr(item, name)).strip("_") in VAGUE:
            yield f"line {item.lineno}: {getattr(item, name)}"  # type: ignore[attr-defined]


def unchecked(file: Path) -> Iterator[str]:
    """Each test without an assertion: its own, an expected error, or a helper with a name that says so."""
    for item in ast.walk(ast.parse(file.read_text())):
        if (
            isinstance(item, ast.FunctionDef)
            and item.name.startswith("test_")
            and not any(map(_asserts, ast.walk(item)))
        ):
            yield f"{file.relative_to(ROOT)}: {item.name}" if file.is_relative_to(ROOT) else item.name


def _asserts(item: ast.AST) -> bool:
    name = getattr(item, "id", getattr(item, "attr", ""))
    return isinstance(item, ast.Assert) or _CHECKING.match(name) is not None


def folder(file: Path) -> str:
    """`rulec/torch`, `backends`."""
    parts = file.relative_to(ROOT).parts
    return "/".join(parts[:2]) if parts[0] == "rulec" and len(parts) > 2 else parts[0]


def total(count: Callable[[Path], Iterable[str]]) -> int:
    """How many there are in all modules."""
    return sum(1 for file in files() for _ in count(file))


def main() -> None:
    """Prints the counts of all folders, or what there is in some."""
    for place in sys.argv[1:]:
        for page in sorted((ROOT / place).rglob("*.md")):
            for line in listed(page):
                print(f"{page.relative_to(ROOT)}: {line}")
        for file in (file for file in files() if file.is_relative_to(ROOT / place)):
            for line in (*obscure(file), *bare(file), *vague(file), *left_behind(file), *read_twice(file)):
                print(f"{file.relative_to(ROOT)}: {line}")
    if len(sys.argv) == 1:
        print(f"{'':20} sentences  obscure  vague names  read twice")
        for place in dict.fromkeys(map(folder, files())):
            inside = [file for file in files() if folder(file) == place]
            counts = [
                sum(1 for file in inside for _ in count(file)) for count in (sentences, obscure, vague, read_twice)
            ]
            print(f"{place:20} {counts[0]:9} {counts[1]:8} {counts[2]:12} {counts[3]:11}")
        print(f"{'all':20} {total(sentences):9} {total(obscure):8} {total(vague):12} {total(read_twice):11}")


if __name__ == "__main__":
    main()
