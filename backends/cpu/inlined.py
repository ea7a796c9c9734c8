"""The update of one element as a function of its own, for kernels that call it several times in a loop."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from rulec.backend.printer import bare
from rulec.compiler.ir import Result
from rulec.language.expr.node import Node

from .source import indented
from .stage import StageWriter

#: The characters in a line, without its indentation.
_WIDTH = 100


def update_function(write: StageWriter, name: str, vectors: Sequence[Result] = ()) -> str:
    """The function: its arguments are `arguments`, its results those of `results`."""
    texts = [bare(write.printer.text(value)) for value in results(write)]
    lines = [*write.value_lines(), f"return {', '.join(texts)}{',' * (len(texts) == 1)}"]
    head = call(f"def {name}", arguments(write, vectors), ":")
    return "\n".join(["@inlined", *head, '    """The new values of one element."""', *indented(lines)])


def arguments(write: StageWriter, vectors: Sequence[Result] = ()) -> list[str]:
    """The old values of an element, the values of vectors, and the scalars."""
    printer = write.printer
    columns = (printer.column(i) for i in printer.columns_used())
    return [*(write.names[b] for b in printer.loads()), *(write.names[v.name] for v in vectors), *columns]


def results(write: StageWriter) -> list[Node]:
    """The values of a stage: first the stored ones, then the reduced ones."""
    return [*(s.value for s in write.stage.stores), *(r.value.args[0] for r in write.stage.reduces)]


def call(function: str, listed: Sequence[str], end: str = "") -> list[str]:
    """A call, or the head of a definition; in several lines where one would be too long."""
    text = ", ".join(listed)
    if len(function) + len(text) <= _WIDTH:
        return [f"{function}({text}){end}"]
    return [f"{function}(", *indented(textwrap.wrap(text, _WIDTH, break_long_words=False)), f"){end}"]
