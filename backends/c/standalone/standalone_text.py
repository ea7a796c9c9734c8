"""Lines of C: wrapped, in loops and in branches."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence

from ...cstyle.text import indented

_WIDTH = 110


def block(lines: Sequence[str]) -> list[str]:
    """Lines in braces."""
    return ["{", *indented(lines), "}"]


def loop(name: str, start: str, stop: str, body: Sequence[str]) -> list[str]:
    """A loop over whole numbers."""
    return [f"for (int64_t {name} = {start}; {name} < {stop}; {name}++) {{", *indented(body), "}"]


def branch(condition: str, body: Sequence[str]) -> list[str]:
    """Lines under a condition."""
    return [f"if ({condition}) {{", *indented(body), "}"]


def guarded(text: str) -> str:
    """A text whose directives for OpenMP are left out by compilers without it."""
    return re.sub(r"^#pragma omp .*$", r"#ifdef _OPENMP\n\g<0>\n#endif", text, flags=re.MULTILINE)


def signature(head: str, parameters: Sequence[str], end: str = "") -> list[str]:
    """`head(parameters)end` on as many lines as it needs."""
    line = f"{head}({', '.join(parameters) or 'void'}){end}"
    if len(line) <= _WIDTH:
        return [line]
    lines = [""]
    for parameter in parameters:
        if lines[-1] and len(lines[-1]) + len(parameter) > _WIDTH - 7:
            lines.append("")
        lines[-1] += f"{' ' if lines[-1] else ''}{parameter},"
    return [f"{head}(", *(f"    {x}" for x in lines[:-1]), f"    {lines[-1][:-1]}){end}"]


def wrapped(line: str) -> list[str]:
    """A line of code on as many lines as it needs; all after the first are two levels further in."""
    stripped = line.lstrip(" ")
    if len(line) <= _WIDTH or stripped.startswith(("#", "/*", "*", "//", 'return "')):
        return [line]
    indent = " " * (len(line) - len(stripped))
    code, slashes, told = stripped.partition("  // ")
    if slashes:
        return [f"{indent}// {told}", *wrapped(f"{indent}{code}")]
    return textwrap.wrap(
        stripped, _WIDTH, initial_indent=indent, subsequent_indent=f"{indent}    ",
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


def extents(view: str, lines: Sequence[str]) -> list[str]:
    """The definitions of a tensor's extents named in lines, from `view->` or `view.`."""
    names = ("ndim", "count", "batch", "rows", "cols")
    return [f"const int64_t {x} = {view}{x};" for x in names if any(re.search(rf"(?<![>.\w]){x}\b", y) for y in lines)]
