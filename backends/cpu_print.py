"""Prints a program as a kernel of the cpu backend: Python that Numba compiles, one line for each named value."""

from __future__ import annotations

import ast
import math
import textwrap
from collections.abc import Sequence

from rulec.backend.layout import Layout
from rulec.backend.printer import (
    OpTable,
    StagePrinter,
    bare,
    buffer_names,
    elementwise_buffers,
    require_elementwise,
    unique_name,
)
from rulec.compiler.ir import Program
from rulec.language.node import Node, Op, is_boolean

from .cpu_threads import ACTIVE, CHUNK_TABLE, NEXT_SPAN, POINTERS, ROW_INDEX, ROWS, SPAN_TABLE, SPANS, TENSORS
from .cpu_words import NAMES

OPS: OpTable = {
    Op.ADD: "({} + {})", Op.SUB: "({} - {})", Op.MUL: "({} * {})", Op.DIV: "({} / {})", Op.NEG: "(-{})",
    Op.POW: "power({}, {})", Op.MOD: "remainder({}, {})", Op.FLOORDIV: "floor({} / {})",
    Op.LT: "({} < {})", Op.LE: "({} <= {})", Op.GT: "({} > {})", Op.GE: "({} >= {})", Op.EQ: "({} == {})",
    Op.NE: "({} != {})", Op.AND: "({} & {})", Op.OR: "({} | {})", Op.NOT: "(not {})", Op.WHERE: "where({}, {}, {})",
    Op.SQRT: "sqrt({})", Op.RSQRT: "rsqrt({})", Op.CBRT: "cbrt({})", Op.ABS: "magnitude({})", Op.SIGN: "sign({})",
    Op.EXP: "exp({})", Op.LOG: "log({})", Op.TANH: "tanh({})", Op.SIGMOID: "sigmoid({})", Op.ERF: "erf({})",
    Op.FLOOR: "floor({})", Op.ISFINITE: "isfinite({})", Op.MINIMUM: "minimum({}, {})", Op.MAXIMUM: "maximum({}, {})",
}  # fmt: skip

#: Exponents with a word of their own: faster than `power`, and as accurate. Small whole ones are products already.
_POWERS = {-1.0: "inverse", -2.0: "inverse_square", 0.5: "root", -0.5: "inverse_root"}

_PARAMETERS = ("pointers", "tensors", "tensor", "row", "start", "stop")

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


def kernel_source(program: Program, layout: Layout) -> str:
    """The source of the kernel of an elementwise program; BackendUnsupported for anything else."""
    write = _Writer(program, layout)
    printer = write.printer
    body = [f"{write.names[b]} = {write.load(b)}" for b in printer.loads()]
    body += [f"{name} = {bare(text)}" for name, text in printer.lines()]
    body += [write.store(s.buffer, bare(printer.text(s.value))) for s in printer.stage.stores]
    scalars = [f"{printer.column(i)} = {write.scalar(i)}" for i in printer.columns_used()]
    title = f"{program.name}: the cpu kernel for {layout.text()}. Printed by rulec."
    return _source(title, write.address_lines() + scalars, body, len(program.scalars.columns))


def limit_source(program: Program, layout: Layout) -> str:
    """A kernel that reads and writes the same arrays and computes nothing: the most that memory allows.

    It stores what it loaded, so that kernels timed beside it meet the same numbers. A mask that is always zero, which
    LLVM cannot know, mixes every load into every store, so that none of them is left out.
    """
    write = _Writer(program, layout)
    loads = write.printer.loads()
    body = [f"{write.names[b]} = {write.load_bits(b)}" for b in loads]
    body += [f"others = ({' ^ '.join(write.names[b] for b in loads)}) & mask"]
    body += [
        write.store_bits(s.buffer, f"{write.names[s.buffer]} ^ others" if s.buffer in loads else "others")
        for s in write.printer.stage.stores
    ]
    title = f"{program.name}: the memory traffic of its cpu kernel for {layout.text()}, alone. Printed by rulec."
    return _source(title, [*write.address_lines(), "mask = tensor >> 62"], body, 0)


def _source(title: str, before: Sequence[str], body: Sequence[str], columns: int) -> str:
    elements = [
        "@compiled",
        f"def elements({', '.join(_PARAMETERS)}):",
        '    """Elements start..stop of one tensor. Its buffers do not overlap."""',
        *(f"    {line}" for line in before),
        "    for i in range(start, stop):",
        *(f"        {line}" for line in body),
    ]
    text = "\n".join(elements) + "\n\n" + _KERNEL.replace("<row bytes>", str(8 * columns))
    return f'"""{title}"""\n\n{_imports(text)}\n\n\n{text}'


def _imports(text: str) -> str:
    used = {n.id for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Name)}
    floats = [name for name in ("inf", "nan") if name in used]
    lines = [f"from math import {', '.join(floats)}\n"] if floats else []
    names = ", ".join(sorted(used & NAMES))
    wrapped = textwrap.fill(names, 112, initial_indent="    ", subsequent_indent="    ", break_long_words=False)
    return "\n".join([*lines, f"from rulec_backends.cpu_words import (\n{wrapped},\n)"])


class _Writer:
    """The names of one kernel's buffers and addresses, and the words that load and store them.

    `names` are the buffers' old values, `at` their addresses; nothing of a rule is called as a word of the kernel.
    """

    def __init__(self, program: Program, layout: Layout) -> None:
        self.program, self.layout = program, layout
        self.buffers = [b.name for b in elementwise_buffers("cpu", program)]
        reserved = set(NAMES) | {*_PARAMETERS, "i", "inf", "nan", "elements", "kernel", "mask", "others", "range"}
        self.names = buffer_names(program, reserved)
        taken = reserved | set(self.names.values())
        self.at = {b: unique_name(f"{self.names[b]}_at", taken) for b in self.buffers}
        stage = require_elementwise("cpu", program)
        # A bfloat16 is stored in fewer instructions where no NaN has odd bits: see cpu_storage.
        self.tame = layout.compute == "float32" and any(layout.dtype(s.buffer) == "bfloat16" for s in stage.stores)
        self.printer = _Printer("cpu", program, stage, OPS, self._constant, self.names.__getitem__, frozenset(taken))

    def _constant(self, value: float) -> str:
        text = repr(value) if math.isfinite(value) else ("nan" if math.isnan(value) else "inf" if value > 0 else "-inf")
        return f"{self.layout.compute}({text})"

    def address_lines(self) -> list[str]:
        """Where each buffer of the tensor lies: the table has a line of all tensors for each buffer."""
        places = ["tensor", "tensors + tensor", *(f"{i} * tensors + tensor" for i in range(2, len(self.buffers)))]
        return [f"{self.at[b]} = word(pointers, {place})" for b, place in zip(self.buffers, places, strict=False)]

    def scalar(self, column: int) -> str:
        """A column of the table, where truth is 1 and 0, in the compute dtype or as true or false."""
        number = f"number(row, {column})"
        if is_boolean(self.program.scalars.columns[column].value):
            return f"{number} != 0.0"
        return self._tamed(f"{self.layout.compute}({number})")

    def _tamed(self, text: str) -> str:
        return f"ordinary({text})" if self.tame else text

    def load(self, buffer: str) -> str:
        """The element before this step, in the compute dtype."""
        storage = self.layout.dtype(buffer)
        text = f"load_{storage}({self._element(buffer)})"
        if self.layout.compute == "float64" and storage != "float64":
            text = f"float64({text})"
        if storage != "bfloat16":
            text = self._tamed(text)
        return f"-{text}" if self.layout.maximize and buffer == "g" else text

    def store(self, buffer: str, value: str) -> str:
        """The statement that stores an element."""
        return f"store_{self.layout.dtype(buffer)}({self._element(buffer)}, {value})"

    def load_bits(self, buffer: str) -> str:
        """The bits of the element."""
        return f"load_bits_{self.layout.dtype(buffer)}({self._element(buffer)})"

    def store_bits(self, buffer: str, bits: str) -> str:
        """The statement that stores the low bits as an element."""
        return f"store_bits_{self.layout.dtype(buffer)}({self._element(buffer)}, {bits})"

    def _element(self, buffer: str) -> str:
        """Address, index, and the number by which LLVM is told that buffers do not overlap."""
        return f"{self.at[buffer]}, i, {self.buffers.index(buffer)}"


class _Printer(StagePrinter):
    """The shared printer, with words for some constant exponents."""

    def text(self, value: Node, defining: bool = False) -> str:
        if value.op is Op.POW and value.args[1].op is Op.CONST and (defining or value not in self.names):
            word = _POWERS.get(float(value.args[1].arg))  # type: ignore[arg-type]
            if word is not None:
                return f"{word}({self.text(value.args[0])})"
        return super().text(value, defining)
