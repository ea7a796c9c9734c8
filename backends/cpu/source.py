"""The source text around printed stages: the loop over chunks, imports of words, and indentation."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Collection, Sequence

from rulec.language.parse.located import syntax_tree

from ..common.threads import (
    ACTIVE,
    CHUNK_TABLE,
    NEXT_SPAN,
    POINTERS,
    ROW_INDEX,
    ROWS,
    SPAN_TABLE,
    SPANS,
    STAGE,
    TENSORS,
)
from . import format_words, noise_words
from .words import NAMES

_KERNEL = f'''
@compiled
def kernel(job):
    """Takes <what> from the job until none is left; any number of threads may run it on one job."""
    fetch_add(job + {8 * ACTIVE}, 1)
<before>
    while True:
        span = fetch_add(job + {8 * NEXT_SPAN}, 1)
        if span >= word(job, {SPANS}):
            break
<body>
    fetch_add(job + {8 * ACTIVE}, -1)
'''

_TABLES = f"""\
spans, chunks = word(job, {SPAN_TABLE}), word(job, {CHUNK_TABLE})
tensors, row_index, rows = word(job, {TENSORS}), word(job, {ROW_INDEX}), word(job, {ROWS})"""

_STAGE = f"stage, pointers = word(job, {STAGE}), word(job, {POINTERS})"

#: The statements for a chunk of elements.
_ELEMENTS = f"""\
tensor = word(chunks, 3 * chunk)
row = rows + word(row_index, tensor) * <row bytes>
start, stop = word(chunks, 3 * chunk + 1), word(chunks, 3 * chunk + 2)
elements(word(job, {POINTERS}), tensors, tensor, row, start, stop)"""

#: The first statements for a chunk of any stage, before the choice of the stage.
_CHUNK = """\
place = chunks + chunk * <chunk bytes>
tensor = word(place, 0)
row = rows + word(row_index, tensor) * <row bytes>"""


def spans_kernel(what: str, before: Sequence[str], body: Sequence[str]) -> str:
    """The entry of a kernel over spans: the lines before its loop, and the statements for one span."""
    inside = "\n".join(indented(indented(body)))
    text = _KERNEL.replace("<what>", what).replace("<before>", "\n".join(indented(before)))
    return text.replace("<body>", inside)


def _chunks_kernel(before: Sequence[str], body: Sequence[str]) -> str:
    """The entry of a kernel over spans of chunks."""
    chunks = loop("chunk", "word(spans, 2 * span)", "word(spans, 2 * span + 1)", body)
    return spans_kernel("spans of chunks", [*_TABLES.splitlines(), *before], chunks)


def elements_source(title: str, before: Sequence[str], body: Sequence[str], row_bytes: int) -> str:
    """The source of a kernel with one stage of elements: the lines before the loop over elements, and its body."""
    return chunks_source(title, [], [*before, *loop("i", "start", "stop", body)], row_bytes)


def chunks_source(title: str, functions: Sequence[str], lines: Sequence[str], row_bytes: int) -> str:
    """The source of a kernel with these functions; `lines` work on elements `start` to `stop` of one tensor."""
    elements = [
        "@compiled",
        "def elements(pointers, tensors, tensor, row, start, stop):",
        '    """Elements start..stop of one tensor. Its buffers do not overlap."""',
        *indented(lines),
    ]
    kernel = _chunks_kernel([], _ELEMENTS.splitlines()).replace("<row bytes>", str(row_bytes))
    return kernel_text(title, "\n\n\n".join([*functions, "\n".join(elements)]) + "\n\n" + kernel)


def stages_source(
    title: str, stages: Sequence[Sequence[Sequence[str]]], chunk_bytes: int, row_bytes: int, before: Sequence[str] = ()
) -> str:  # fmt: skip
    """The source of a kernel with the bodies of these stages' functions, after others; an empty stage has none."""
    functions, calls = [f"{text}\n" for text in before], []
    for index, parts in enumerate(stages):
        calls += [f"if stage == {index}:"] * bool(parts)
        for number, lines in enumerate(parts):
            name = f"stage_{index}" + f"_{number}" * bool(number)
            head = ["@compiled", f"def {name}(pointers, tensors, tensor, row, chunk, place):"]
            functions.append("\n".join([*head, *indented(lines)]) + "\n\n")
            calls.append(f"    {name}(pointers, tensors, tensor, row, chunk, place)")
    kernel = _chunks_kernel([_STAGE], [*_CHUNK.splitlines(), *calls]).replace("<chunk bytes>", str(chunk_bytes))
    count = "1 stage" if len(stages) == 1 else f"{len(stages)} stages"
    text = "\n".join([*functions, kernel.lstrip("\n").replace("<row bytes>", str(row_bytes))])
    return kernel_text(f"{title}, {count}", text)


def loop(name: str, start: str, stop: str, body: Sequence[str]) -> list[str]:
    """The lines of a loop over whole numbers; none for an empty body."""
    if not body:
        return []
    return [f"for {name} in range({start}, {stop}):", *indented(body)]


def indented(lines: Sequence[str]) -> list[str]:
    """Lines one level further in."""
    return [f"    {line}" for line in lines]


def kernel_text(title: str, text: str) -> str:
    """A file of this text, after the imports of its words."""
    return f'"""{title}. Printed by rulec."""\n\n{_imports(text)}\n\n\n{text}'


def _imports(text: str) -> str:
    used = {n.id for n in ast.walk(syntax_tree(text)) if isinstance(n, ast.Name)}
    floats = [name for name in ("inf", "nan") if name in used]
    lines = [f"from math import {', '.join(floats)}\n"] if floats else []
    modules = {"format_words": format_words.NAMES, "noise_words": noise_words.NAMES, "words": NAMES}
    return "\n".join(lines + [_import(module, used & names) for module, names in modules.items() if used & names])


def _import(module: str, names: Collection[str]) -> str:
    listed = ", ".join(sorted(names))
    wrapped = textwrap.fill(listed, 112, initial_indent="    ", subsequent_indent="    ", break_long_words=False)
    return f"from rulec_backends.cpu.{module} import (\n{wrapped},\n)"
