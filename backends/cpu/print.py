"""Prints a program as a kernel of the cpu backend: Python code for Numba, one line for each named value.

A program of one elementwise stage is a function of a range of elements. Any other has a function for each stage, of one
chunk: a range of elements, or some rows and columns of a tensor's matrices where the stage sees them.

Some kernels of bfloat16 take two neighbouring elements at once, as one word of 32 bits. The lower half of a word
becomes a float by a shift, the upper half by a mask, and two floats are joined into a word as easily. A bfloat16 by
itself is first moved to a lane twice as wide, and back: half of such a kernel's instructions.

Kernels for the memory limit move the same bytes as a program's kernel and compute nothing. They store the loaded
numbers, so kernels timed beside them get the same ones. LLVM must not remove a load: a mask, always zero but unknown to
LLVM, mixes every load into every store. In a stage without stores it mixes the loads into a zero in the slot of a
reduction. Values of rows and columns are few beside elements, and left out.
"""

from __future__ import annotations

from dataclasses import replace

from rulec.compiler.ir import Program, Result, Stage
from rulec.compiler.layout import Layout
from rulec.kernel.multi_tensor.chunks import CHUNK_COLUMNS, chunk_columns
from rulec.kernel.nest import Level, written
from rulec.kernel.place import COL, ELEMENT, MATRIX, ROW, TENSOR, is_shaped
from rulec.language.expr.node import Op, walk

from ..common.text import docstring, left_by
from .coded import CodedParts, format_functions
from .rows import LOCALS as ROW_LOCALS
from .rows import RowGroup, arguments, call, in_groups, update_function, vectors_of
from .source import chunks_source, elements_source, indented, loop, stages_source
from .stage import StageWriter
from .work import vector_lines

#: Reductions in one function, at most: Numba searches all lines of a function for each changed variable.
MOST_REDUCED = 32

#: The line that reads a chunk's range of elements, and the lines that read its matrices, rows and columns.
ELEMENTS = "start, stop = word(place, 1), word(place, 2)"
_SHAPE = [
    f"{a}, {b} = word(place, {CHUNK_COLUMNS.index(a)}), word(place, {CHUNK_COLUMNS.index(b)})"
    for a, b in (("first", "last"), ("height", "width"), ("top", "bottom"), ("left", "right"))
]


def kernel_source(program: Program, layout: Layout) -> str:
    """The source of a program's kernel; BackendUnsupported for an operation without a word."""
    row_bytes = 8 * len(program.columns)
    title = f"{program.name}: the cpu kernel for {layout.text()}"
    functions = format_functions([form for _, form in layout.formats])
    if program.elementwise:
        write = StageWriter(program, layout, program.stages[0], PAIR_LOCALS)
        if in_pairs(write):
            lines = [*vector_lines(write.arithmetic_lines()), *pair_lines(write)]
            return chunks_source(title, [update_function(write, "update")], lines, row_bytes)
        parts = CodedParts(write)
        body = [*write.load_lines(), *write.arithmetic_lines()]
        before = [*vector_lines(write.arithmetic_lines()), *parts.address_lines(), *write.scalar_lines()]
        lines = [*before, *parts.loop(body)]
        return chunks_source(title, functions, lines, row_bytes)
    stages = []
    for index, stage in enumerate(program.stages):
        name, shaped = f"element_{index}", is_shaped(program, stage, layout)
        writers = [StageWriter(program, layout, part, {name, *ROW_LOCALS}) for part in _parts(program, stage)]
        last = writers[-1] if writers else None
        group = RowGroup(last, name) if last is not None and in_groups(last) else None
        if group is not None:
            functions.append(update_function(group.write, name, vectors_of(group.write)) + "\n")
        stages.append([_stage_lines(write, shaped, group if write is last else None) for write in writers])
    return stages_source(title, stages, 8 * chunk_columns(program, layout), row_bytes, functions)


def _parts(program: Program, stage: Stage) -> list[Stage]:
    """A stage as passes of a few reductions each. The stores come in the last, after all reads.

    Statistics of one array are a pass by themselves. The rule's own sums come next, and find the array in the cache.
    """
    if not stage.roots:
        return []
    mixed = any(r.name not in program.measured for r in stage.reduces)
    apart = [r for r in stage.reduces if mixed and r.name in program.measured and _reads_one(r)]
    passes = [*([apart] if apart else []), [r for r in stage.reduces if r not in apart]]
    cuts = [each[at : at + MOST_REDUCED] for each in passes for at in range(0, max(len(each), 1), MOST_REDUCED)]
    parts = [replace(stage, stores=(), reduces=tuple(cut)) for cut in cuts]
    return [*parts[:-1], replace(parts[-1], stores=stage.stores)]


def _reads_one(reduction: Result) -> bool:
    """Whether a reduction reads one array, and nothing of lines or other stages."""
    read = [n for n in walk([reduction.value]) if n.op in (Op.LOAD, Op.RESULT)]
    return len(read) == 1 and read[0].op is Op.LOAD


def _stage_lines(write: StageWriter, shaped: bool, group: RowGroup | None) -> list[str]:
    """The body of the function of a stage, or of a part of a stage, on one chunk."""
    parts = CodedParts(write)
    ranges = _SHAPE if shaped else [ELEMENTS]
    before = [*_vectors(write), *ranges, *parts.address_lines(), *write.scalar_lines()]
    lines = written(write.nest.levels(shaped), _Loops(write, shaped, parts, group))
    return [*docstring(f"One chunk: {left_by(write.stage)}. Buffers do not overlap."), *before, *lines]


def _vectors(write: StageWriter) -> list[str]:
    """The requests for vectors of a stage. Beside sums of the rule they are those of the stage without statistics.

    Wider vectors add up in another order.
    """
    stage = write.stage
    kept = tuple(r for r in stage.reduces if r.name not in write.program.measured)
    if kept and len(kept) < len(stage.reduces):
        write = StageWriter(write.program, write.layout, replace(stage, reduces=kept))
    return vector_lines(write.arithmetic_lines())


class _Loops:
    """Python's loops: `i` counts elements, `j` the columns of all matrices."""

    def __init__(self, write: StageWriter, shaped: bool, parts: CodedParts, group: RowGroup | None) -> None:
        self.write, self.shaped, self.parts, self.group = write, shaped, parts, group
        self.has_columns = write.nest.sees(COL)

    def enter(self, level: Level) -> list[str]:
        """Values of a row or a matrix, first values for slots of its columns, and the variables of reductions."""
        emptied = self.write.empty_lines(level.empties)
        return [
            *["back = (line - matrix) * width"] * (level.place == ROW and self.has_columns),
            *self.write.vector_lines(level.place),
            *(loop("j", "matrix * width + left", "matrix * width + right", emptied) if emptied else []),
            *self.write.begin_lines(level.totals),
        ]  # fmt: skip

    def loop(self, level: Level, body: list[str]) -> list[str]:
        """A loop over the matrices of a chunk, the rows of a matrix, or the elements of a row or a chunk."""
        if level.place == MATRIX:
            return loop("matrix", "first", "last", body)
        if level.place == ROW:
            if self.group is not None:
                return self.group.loop(level, body)
            return loop("line", "matrix * height + top", "matrix * height + bottom", body)
        if self.shaped:
            return self.write.partial.loop("line * width + left", "line * width + right", body)
        return self.parts.loop(body)

    def leave(self, level: Level) -> list[str]:
        """The stores of the reductions of a row or a chunk."""
        return self.write.end_lines(level.totals, "line" if level.place == ROW else "chunk")

    def element(self) -> list[str]:
        """The statements for one element."""
        write = self.write
        return [
            *["j = i - back"] * self.has_columns, *write.load_lines(), *write.vector_lines(ELEMENT, COL),
            *write.arithmetic_lines(),
        ]  # fmt: skip


#: The names of this text that no value of a rule gets.
PAIR_LOCALS = frozenset({"lower", "upper", "last", "update"})

_STORAGE = "bfloat16"


def in_pairs(write: StageWriter) -> bool:
    """Whether a stage of elements has all of them in bfloat16, and none of its values depends on an element's place."""
    buffers = write.nest.buffers
    plain = all(write.layout.dtype(b) == _STORAGE and not write.layout.format(b) for b in buffers)
    return plain and not any(n.op is Op.CHANCE for n in walk(write.stage.roots))


def pair_lines(write: StageWriter) -> list[str]:
    """The loop over the pairs of elements `start` to `stop`, and the last element of an odd number."""
    two = [
        f"store_two_{_STORAGE}({write.element(s.buffer)}, lower[{number}], upper[{number}])"
        for number, s in enumerate(write.stage.stores)
    ]
    one = [
        f"store_{_STORAGE}({write.element(s.buffer)}, last[{number}])" for number, s in enumerate(write.stage.stores)
    ]
    return [
        *(f"{write.at[b]} = {write.address(b)} + 2 * start" for b in write.lines if b in write.nest.buffers),
        *write.scalar_lines(),
        *loop("i", "0", "(stop - start) // 2", [*_updated(write, "lower"), *_updated(write, "upper"), *two]),
        "if (stop - start) % 2:",
        *indented(["i = stop - start - 1", *_updated(write, "last"), *one]),
    ]  # fmt: skip


def _updated(write: StageWriter, which: str) -> list[str]:
    """The new values of an element: of the lower or the upper half of a word, or of the last element."""
    word = f"{'load' if which == 'last' else which}_{_STORAGE}"
    loads = [f"{write.names[b]} = {write.load(b, word)}" for b in write.printer.loads()]
    return [*loads, *call(f"{which} = update", arguments(write))]


_MASK = "mask = tensor >> 62"


def limit_source(program: Program, layout: Layout) -> str:
    """The source of a program's limit kernel, with chunks of elements in every stage."""
    title = f"{program.name}: the memory traffic of its cpu kernel for {layout.text()}, alone"
    if program.elementwise:
        write = StageWriter(program, layout, program.stages[0])
        body = [*write.load_bits_lines(), f"others = ({_mixed(write)}) & mask", *_store_lines(write)]
        return elements_source(title, [*write.address_lines(), _MASK], body, 0)
    stages = [[_limit_lines(StageWriter(program, layout, stage))] if stage.roots else [] for stage in program.stages]
    return stages_source(title, stages, 8 * chunk_columns(program, layout), 0)


def _limit_lines(write: StageWriter) -> list[str]:
    """The body of a stage's function."""
    loads, mixed = write.load_bits_lines(), _mixed(write)
    used = [*write.moved(), *(s.buffer for s in write.stage.stores), *(r.name for r in write.stage.reduces[:1])]
    before = [ELEMENTS, *write.addresses(used), _MASK]
    if write.stage.stores:
        body = [*loads, f"others = ({mixed}) & mask", *_store_lines(write)]
        return [*before, *loop("i", "start", "stop", body)]
    slot = write.stage.reduces[0]
    index = "chunk" if write.nest.place(slot) == TENSOR else "0"
    return [
        *before, "others = 0", *loop("i", "start", "stop", [*loads, f"others = others ^ {mixed}"]),
        write.store_zero(slot.name, index, "others & mask"),
    ]  # fmt: skip


def _mixed(write: StageWriter) -> str:
    return " ^ ".join(write.names[name] for name in write.moved()) or "0"


def _store_lines(write: StageWriter) -> list[str]:
    moved = write.moved()
    return [
        write.store_bits(s.buffer, f"{write.names[s.buffer]} ^ others" if s.buffer in moved else "others")
        for s in write.stage.stores
    ]
