"""The source text around printed stages: the loop over chunks, the words it imports, and how lines are indented."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Collection, Sequence

from . import noise_words
from .threads import ACTIVE, CHUNK_TABLE, NEXT_SPAN, POINTERS, ROW_INDEX, ROWS, SPAN_TABLE, SPANS, STAGE, TENSORS
from .words import NAMES

_KERNEL = f'''
@compiled
def kernel(job):
    """Takes spans of chunks from the job until none is left; any number of threads may run it on one job."""
    fetch_add(job + {8 * ACTIVE}, 1)
    spans, chunks = word(job, {SPAN_TABLE}), word(job, {CHUNK_TABLE})
    tensors, row_index, rows = word(job, {TENSORS}), word(job, {ROW_INDEX}), word(job, {ROWS})
    while True:
        span = fetch_add(job + {8 * NEXT_SPAN}, 1)
        if span >= word(job, {SPANS}):
            break
        for chunk in range(word(spans, 2 * span), word(spans, 2 * span + 1)):
            tensor = word(chunks, 3 * chunk)
            row = rows + word(row_index, tensor) * <row bytes>
            start, stop = word(chunks, 3 * chunk + 1), word(chunks, 3 * chunk + 2)
            elements(word(job, {POINTERS}), tensors, tensor, row, start, stop)
    fetch_add(job + {8 * ACTIVE}, -1)
'''

_STAGED_KERNEL = f'''
@compiled
def kernel(job):
    """Takes spans of chunks from the job until none is left; any number of threads may run it on one job."""
    fetch_add(job + {8 * ACTIVE}, 1)
    spans, chunks = word(job, {SPAN_TABLE}), word(job, {CHUNK_TABLE})
    tensors, row_index, rows = word(job, {TENSORS}), word(job, {ROW_INDEX}), word(job, {ROWS})
    stage, pointers = word(job, {STAGE}), word(job, {POINTERS})
    while True:
        span = fetch_add(job + {8 * NEXT_SPAN}, 1)
        if span >= word(job, {SPANS}):
            break
        for chunk in range(word(spans, 2 * span), word(spans, 2 * span + 1)):
            place = chunks + chunk * <chunk bytes>
            tensor = word(place, 0)
            row = rows + word(row_index, tensor) * <row bytes>
<stages>
    fetch_add(job + {8 * ACTIVE}, -1)
'''


def elements_source(title: str, before: Sequence[str], body: Sequence[str], row_bytes: int) -> str:
    """The source of a kernel with one stage of elements: lines before the loop over them, and in it."""
    return chunks_source(title, [], [*before, *loop("i", "start", "stop", body)], row_bytes)


def chunks_source(title: str, functions: Sequence[str], lines: Sequence[str], row_bytes: int) -> str:
    """The source of a kernel with these functions, whose lines take elements start to stop of one tensor."""
    elements = [
        "@compiled",
        "def elements(pointers, tensors, tensor, row, start, stop):",
        '    """Elements start..stop of one tensor. Its buffers do not overlap."""',
        *_indented(lines),
    ]
    kernel = _KERNEL.replace("<row bytes>", str(row_bytes))
    return _source(title, "\n\n\n".join([*functions, "\n".join(elements)]) + "\n\n" + kernel)


def stages_source(title: str, stages: Sequence[Sequence[Sequence[str]]], chunk_bytes: int, row_bytes: int) -> str:
    """The source of a kernel with the bodies of these stages' functions; a stage without one does nothing."""
    functions, calls = [], []
    for index, parts in enumerate(stages):
        calls += [f"if stage == {index}:"] * bool(parts)
        for number, lines in enumerate(parts):
            name = f"stage_{index}" + f"_{number}" * bool(number)
            head = ["@compiled", f"def {name}(pointers, tensors, tensor, row, chunk, place):"]
            functions.append("\n".join([*head, *_indented(lines)]) + "\n\n")
            calls.append(f"    {name}(pointers, tensors, tensor, row, chunk, place)")
    called = "\n".join(f"            {line}" for line in calls)
    kernel = _STAGED_KERNEL.replace("<chunk bytes>", str(chunk_bytes)).replace("<stages>", called)
    count = "1 stage" if len(stages) == 1 else f"{len(stages)} stages"
    text = "\n".join([*functions, kernel.lstrip("\n").replace("<row bytes>", str(row_bytes))])
    return _source(f"{title}, {count}", text)


def loop(name: str, start: str, stop: str, body: Sequence[str]) -> list[str]:
    """The lines of a loop over whole numbers; none where nothing is done in it."""
    if not body:
        return []
    return [f"for {name} in range({start}, {stop}):", *_indented(body)]


def _indented(lines: Sequence[str]) -> list[str]:
    return [f"    {line}" for line in lines]


def _source(title: str, text: str) -> str:
    return f'"""{title}. Printed by rulec."""\n\n{_imports(text)}\n\n\n{text}'


def _imports(text: str) -> str:
    used = {n.id for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Name)}
    floats = [name for name in ("inf", "nan") if name in used]
    lines = [f"from math import {', '.join(floats)}\n"] if floats else []
    modules = {"noise_words": used & noise_words.NAMES, "words": used & NAMES}
    return "\n".join(lines + [_import(module, names) for module, names in modules.items() if names])


def _import(module: str, names: Collection[str]) -> str:
    listed = ", ".join(sorted(names))
    wrapped = textwrap.fill(listed, 112, initial_indent="    ", subsequent_indent="    ", break_long_words=False)
    return f"from rulec_backends.cpu.{module} import (\n{wrapped},\n)"
