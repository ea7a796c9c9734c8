"""The syntax of Rust, in rustfmt's style, for modules that call the C functions of a rule."""

from __future__ import annotations

from collections.abc import Sequence

from rulec.backend.printer import unique_name

from ...cstyle.dialect import indented
from .model import FUNCTIONS, CFile

#: Columns of a line in rustfmt's style.
WIDTH = 100

#: Characters of arguments on one line, and of a struct's fields, in rustfmt's style.
_LIST_WIDTH, _FIELDS_WIDTH = 60, 18

_WORDS = """
    abstract as async await become box break const continue crate do dyn else enum extern false final fn for gen if impl
    in let loop macro match mod move mut override priv pub ref return self Self static struct super trait true try type
    typeof unsafe unsized use virtual where while yield
"""

#: Words that name no field, function or module.
KEYWORDS = frozenset(_WORDS.split())

#: The types of elements, by their type in C.
REALS = {"float": "f32", "double": "f64", "uint16_t": "u16"}


def named(name: str) -> str:
    """A name that is no word of Rust."""
    return unique_name(name, set(KEYWORDS))


def signature(head: str, takes: Sequence[str], end: str, indent: int) -> list[str]:
    """`head(takes)end` as rustfmt has it."""
    line = f"{head}({', '.join(takes)}){end}"
    if len(line) <= WIDTH - indent:
        return [line]
    return [f"{head}(", *indented([f"{x}," for x in takes]), f"){end}"]


def literal(name: str, values: Sequence[str]) -> list[str]:
    """A struct's literal as rustfmt has it."""
    if len(listed := ", ".join(values)) <= _FIELDS_WIDTH:
        return [f"{name} {{ {listed} }}"]
    return [f"{name} {{", *indented([f"{value}," for value in values]), "}"]


def quoted(text: str) -> str:
    """A text as a literal."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def arguments(file: CFile, word: str, state: str) -> list[str]:
    """The arguments of a C function, from the slices and the state of a safe function."""
    start = "as_mut_ptr" if FUNCTIONS[word][0] == "status" else "as_ptr"
    values = {"state": f"{state}.block.{start}().cast()", "ndim": f"{state}.extents.len() as c_int",
              "shape": f"{state}.extents.as_ptr()", "count": f"{state}.count as i64"}  # fmt: skip
    texts = []
    for p in file.parameters(word):
        pointer = f"{named(p.name)}.{'as_mut_ptr' if p.written else 'as_ptr'}()"
        texts.append(values.get(p.name) or (pointer if p.kind == "elements" else named(p.name)))
    return texts


def call(file: CFile, word: str, end: str) -> list[str]:
    """The checked call of a C function with a status, as rustfmt has it."""
    values, indent = arguments(file, word, "state"), 8 if word == "init" else 4
    listed = ", ".join(values)
    line = f"{file.name}_{word}({listed})"
    narrow = len(listed) <= _LIST_WIDTH
    if narrow and len(whole := f"checked(unsafe {{ {line} }}){end}") <= WIDTH - indent:
        return [whole]
    several = [f"{file.name}_{word}(", *indented([f"{x}," for x in values]), ")"]
    return ["checked(unsafe {", *indented([line] if narrow else several), f"}}){end}"]


def own_parameters(file: CFile, word: str, before: Sequence[str]) -> list[tuple[str, str]]:
    """The name and kind of the parameters that a function has for this rule alone."""
    known = {*before, "state", "count", "ndim", "shape", "hyper"}
    return [(named(p.name), p.kind) for p in file.parameters(word) if p.name not in known]
