"""What the writers of type stubs share: the lines of a signature, and files that are written or compared."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path


def signature_lines(
    parameters: Iterable[inspect.Parameter], text: Callable[[inspect.Parameter], str], first: Iterable[str] = ()
) -> str:
    """A line for each parameter, indented by four spaces, with `*,` before those by keyword alone."""
    lines, keyword_only = [*first], False
    for parameter in parameters:
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and not keyword_only:
            keyword_only = True
            lines.append("*,")
        lines.append(text(parameter))
    return textwrap.indent("\n".join(lines), "    ")


def write_or_check(texts: Mapping[Path, str], arguments: list[str]) -> int:
    """Writes the files, or with `--check` compares them; 1 where one differs."""
    if "--check" in arguments:
        return int(any(not path.is_file() or path.read_text(encoding="utf-8") != text for path, text in texts.items()))
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
    return 0
