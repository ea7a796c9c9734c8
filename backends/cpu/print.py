"""Prints a program as a kernel of the cpu backend: Python that Numba compiles, one line for each named value.

A program of one elementwise stage is a function of a range of elements. Any other has a function for each stage, of one
chunk: of elements alike, or, where rows and columns matter, of some rows and columns of a tensor's matrices.
"""

from __future__ import annotations

from dataclasses import replace

from rulec.backend.layout import Layout
from rulec.compiler.ir import Program, Stage

from ..plan import COL, ELEMENT, MATRIX, ROW, TENSOR, is_shaped
from .plan import CHUNK_COLUMNS, chunk_columns
from .source import elements_source, loop, stages_source
from .stage import StageWriter

#: Reductions in one function, at most: Numba looks through all lines of a function for each variable that is changed.
MOST_REDUCED = 32

#: The line that reads which elements a chunk has.
ELEMENTS = "start, stop = word(place, 1), word(place, 2)"


def kernel_source(program: Program, layout: Layout) -> str:
    """The source of a program's kernel; BackendUnsupported for an operation that no word is for."""
    row_bytes = 8 * len(program.columns)
    title = f"{program.name}: the cpu kernel for {layout.text()}"
    if program.elementwise:
        write = StageWriter(program, layout, program.stages[0])
        body = [*write.load_lines(), *write.value_lines(), *write.store_lines()]
        return elements_source(title, [*write.address_lines(), *write.scalar_lines()], body, row_bytes)
    stages = [_parts_lines(program, layout, stage) for stage in program.stages]
    return stages_source(title, stages, 8 * chunk_columns(program, layout), row_bytes)


def _parts_lines(program: Program, layout: Layout, stage: Stage) -> list[list[str]]:
    """The bodies of the functions that run a stage on one chunk, one after the other; none where it does nothing."""
    shaped = is_shaped(program, stage, layout)
    return [_stage_lines(StageWriter(program, layout, part), shaped) for part in _parts(stage)]


def _parts(stage: Stage) -> list[Stage]:
    """A stage as passes of a few reductions each, stores in the last: what others read must not be overwritten."""
    if not stage.roots:
        return []
    cuts = range(0, max(len(stage.reduces), 1), MOST_REDUCED)
    parts = [replace(stage, stores=(), reduces=stage.reduces[at : at + MOST_REDUCED]) for at in cuts]
    return [*parts[:-1], replace(parts[-1], stores=stage.stores)]


def _stage_lines(write: StageWriter, shaped: bool) -> list[str]:
    """The body of the function that runs a stage, or a part of one, on one chunk."""
    body = _shaped_lines(write) if shaped else _flat_lines(write)
    return [f'"""{_about(write.stage)} Buffers do not overlap."""', *body]


def _about(stage: Stage) -> str:
    """What a stage leaves, in a sentence."""
    stored = f"stores {', '.join(s.buffer for s in stage.stores)}"
    reduced = f"reduces to {', '.join(f'{r.name} per {r.value.arg}' for r in stage.reduces)}"
    return f"One chunk: {'; '.join([stored] * bool(stage.stores) + [reduced] * bool(stage.reduces))}."


def _flat_lines(write: StageWriter) -> list[str]:
    """A loop over elements."""
    body = [
        *write.load_lines(), *write.vector_lines(ELEMENT), *write.value_lines(), *write.store_lines(),
        *write.reduce_lines(TENSOR),
    ]  # fmt: skip
    return [
        ELEMENTS, *write.address_lines(), *write.scalar_lines(), *write.begin_lines(TENSOR),
        *loop("i", "start", "stop", body), *write.end_lines(TENSOR, "chunk"),
    ]  # fmt: skip


def _shaped_lines(write: StageWriter) -> list[str]:
    """Loops over matrices, their rows, and the neighbouring elements of a row."""
    matrix = [
        *write.vector_lines(MATRIX), *_clear_lines(write),
        *loop("line", "matrix * height + top", "matrix * height + bottom", _row_lines(write)),
    ]  # fmt: skip
    ranges = [("first", "last"), ("height", "width"), ("top", "bottom"), ("left", "right")]
    shape = [
        f"{a}, {b} = word(place, {CHUNK_COLUMNS.index(a)}), word(place, {CHUNK_COLUMNS.index(b)})" for a, b in ranges
    ]
    return [
        *shape, *write.address_lines(), *write.scalar_lines(), *write.begin_lines(TENSOR),
        *loop("matrix", "first", "last", matrix), *write.end_lines(TENSOR, "chunk"),
    ]  # fmt: skip


def _clear_lines(write: StageWriter) -> list[str]:
    """A loop that empties the slots of a matrix's columns, where there are any."""
    body = write.clear_lines()
    return loop("j", "matrix * width + left", "matrix * width + right", body) if body else []


def _row_lines(write: StageWriter) -> list[str]:
    """What is done with a row: `i` counts elements, `j` the columns of all matrices."""
    has_columns = bool(write.vector_lines(COL) or write.clear_lines())
    elements = [
        *["j = i - back"] * has_columns, *write.load_lines(), *write.vector_lines(ELEMENT, COL),
        *write.value_lines(), *write.store_lines(), *write.reduce_lines(ROW, TENSOR), *write.column_lines(),
    ]  # fmt: skip
    return [
        *["back = (line - matrix) * width"] * has_columns, *write.vector_lines(ROW), *write.begin_lines(ROW),
        *loop("i", "line * width + left", "line * width + right", elements), *write.end_lines(ROW, "line"),
    ]  # fmt: skip
