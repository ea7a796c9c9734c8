"""The names in what rulec prints are nouns of the field, as in its own code, and its licences have whole lines."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterable, Iterator

import pytest

import rulec
from docs.examples.opencl import OpenclBackend
from rulec.backend import registry
from rulec.errors import RulecError
from rulec.standalone.prose import LICENCE, WRITTEN, written
from rulec.testing.cases import loaded
from rulec.tools.display.kernels import kernel_source, layout_of, program_of
from rulec_backends.c import binary as c_binary
from rulec_backends.cupy import binary as cupy_binary
from tests.backends.kinds import KINDS

BANNED = frozenset({"found", "own", "given", "made", "held", "told"})

#: Comments and texts of a language.
ASIDE = {
    "c": r"/\*.*?\*/|//[^\n]*|\"[^\"\n]*\"", "f90": r"'[^'\n]*'|\"[^\"\n]*\"|![^\n]*",
    "jl": r'""".*?"""|"[^"\n]*"|#[^\n]*',
}  # fmt: skip
#: The language of a file, by the end of its name.
LANGUAGE = {"c": "c", "h": "c", "cu": "c", "rs": "c", "f90": "f90", "jl": "jl"}


def names(text: str, kind: str) -> Iterator[str]:
    """The names in a file's code, and those that its comments quote."""
    yield from (name for quoted in re.findall(r"`([^`\n]*)`", text) for name in re.findall(r"[A-Za-z_]\w*", quoted))
    if kind == "py":
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        yield from (token.string for token in tokens if token.type == tokenize.NAME)
    else:
        yield from re.findall(r"[A-Za-z_]\w*", re.sub(ASIDE[LANGUAGE[kind]], " ", text, flags=re.DOTALL))


def banned(text: str, kind: str) -> set[str]:
    """The names of which a word is banned."""
    words = {name: re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name) for name in {*names(text, kind)}}
    return {name for name, parts in words.items() if BANNED & {part.lower() for part in parts}}


def printed(rule: str) -> Iterator[tuple[str, str]]:
    """Each text of a rule with the end of its file's name: kernels, files to copy, and kernels in OpenCL."""
    chosen = loaded(rule)
    for backend in registry.names():
        try:
            yield {"c": "c", "cupy": "cu"}.get(backend, "py"), kernel_source(chosen, backend)
        except RulecError:
            continue
    for backend, bindings in [*((backend, ()) for backend in WRITTEN), ("c", ("rust",))]:
        try:
            files = written(chosen, backend, bindings=bindings)
        except RulecError:
            continue
        yield from ((name.rpartition(".")[2], text) for name, text in files.items())
    program = program_of(chosen, "float32")
    yield "c", OpenclBackend().emit(program, layout_of(program, "float32"))


def faults(rules: Iterable[str]) -> set[tuple[str, str, str]]:
    """The rule, the kind of file and the name, of each banned name."""
    return {(rule, kind, name) for rule in rules for kind, text in printed(rule) for name in banned(text, kind)}


def test_names_are_nouns() -> None:
    assert faults(["muon"]) == set()
    assert banned(c_binary.source(), "c") == banned(cupy_binary.source(), "cu") == set()


@pytest.mark.slow
def test_names_of_every_kind_of_rule_are_nouns() -> None:
    assert faults(KINDS) == set()


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("/* found */ int given_0; // own", "c"), ("/* `x` and `held` */", "h"), ("enum { ADAMW_GIVEN_0 };", "cu"),
        ('fn f(found: usize) { g("own") }', "rs"), ("logical :: found ! own", "f90"), ("made = 1 # own", "jl"),
        ("made = 'own'  # found", "py"),
    ],
)  # fmt: skip
def test_a_banned_name_is_seen(text: str, kind: str) -> None:
    assert len(banned(text, kind)) == 1


def test_a_licence_keeps_its_lines() -> None:
    """A wrapped line of a wrapped text would be short, and the next one long."""
    rule = rulec.load("sgd")
    for backend in ("c", "cuda", "jax"):
        text = next(iter(written(rule, backend).values()))
        lines = [line.removeprefix(" *").removesuffix(" */").strip() for line in text.splitlines()]
        first = lines.index("MIT License")
        assert lines[first : first + LICENCE.count("\n")] == LICENCE.splitlines()
