"""The dialects C99, CUDA C and OpenCL C, and lines of C-style source: indentation, argument lists, comments."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Dialect:
    """A language of the C family.

    `backend` is the backend's name, for errors. `function` stands before every function that the compiler should
    inline. `words` has the dialect's spellings of some of `words.WORDS`, by name. No value of a rule gets a name in
    `reserved`. `memory` stands before the type of array elements. `simd` are lines before a loop with independent
    passes; `table` stands before a table of constants. With `branches`, an element may take a rare branch alone: else a
    branch costs more than a division, as compilers make no vectors of its loop. Source may use int64_t, uint32_t,
    uint16_t, bool, INFINITY, NAN, and from C99's math.h `words.LIBRARY`.
    """

    backend: str
    function: str = "RULEC_FUNCTION"
    words: Mapping[str, str] = field(default_factory=dict)
    reserved: frozenset[str] = frozenset()
    memory: str = ""
    simd: tuple[str, ...] = ()
    table: str = "static const"
    branches: bool = False


#: The width of a printed line, at most.
WIDTH = 110


def indented(lines: Sequence[str]) -> list[str]:
    """The lines one step further to the right; lines for the preprocessor stay at the margin."""
    return [line if line.startswith("#") or not line else f"    {line}" for line in lines]


def block(head: str, body: Sequence[str]) -> list[str]:
    """A statement with a body; in braces where the body has several lines."""
    return [head, *indented(body)] if len(body) == 1 else [f"{head} {{", *indented(body), "}"]


def call_lines(function: str, groups: Sequence[Sequence[str]], end: str) -> list[str]:
    """`function(arguments)end` on one line, or each group of its arguments on lines of their own."""
    line = f"{function}({', '.join(item for group in groups for item in group)}){end}"
    if len(line) <= WIDTH - 8:
        return [line]
    texts = [", ".join(item.replace(" ", "\0") for item in group) for group in groups if group]
    last = len(texts) - 1
    lines = [
        f"    {wrapped}"
        for i, text in enumerate(texts)
        for wrapped in textwrap.wrap(text + (f"){end}" if i == last else ","), WIDTH - 16, break_long_words=False)
    ]
    return [f"{function}(", *(x.replace("\0", " ") for x in lines)]


def comment(lines: Sequence[str]) -> list[str]:
    """A comment; a long line continues on another. `*/` in a line becomes `* /`, so that no text ends the comment."""
    clean = [part for line in lines for part in _folded(line.replace("*/", "* /").replace("/*", "/ *"))]
    rows = [f"{' *' if i else '/*'} {line}".rstrip() for i, line in enumerate(clean)]
    return [*rows[:-1], f"{rows[-1]} */"]


def _folded(line: str) -> list[str]:
    margin = " " * (len(line) - len(line.lstrip()))
    deeper = margin + "    " * bool(margin)
    return textwrap.wrap(line, WIDTH, subsequent_indent=deeper, break_long_words=False, break_on_hyphens=False) or [""]
