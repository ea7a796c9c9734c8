"""Prints a program as a kernel of the cpu backend: Python that Numba compiles, one line for each named value."""

from __future__ import annotations

import ast
import math
import re
import textwrap
from collections.abc import Iterable, Sequence

from rulec.backend.layout import Layout, kernel_buffers
from rulec.backend.printer import OpTable, StagePrinter, identifier, require_elementwise
from rulec.compiler.ir import Buffer, Program
from rulec.errors import BackendUnsupported
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

#: Exponents with a word of their own, which multiplies or takes roots: exact to 1.5 ulp and much faster than `power`.
_POWERS = {
    2.0: "square",
    3.0: "cube",
    4.0: "fourth",
    -1.0: "inverse",
    -2.0: "inverse_square",
    0.5: "root",
    -0.5: "inverse_root",
}

_PARAMETERS = ("pointers", "tensors", "tensor", "row", "start", "stop", "i")

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
    buffers = _elementwise_buffers(program)
    printer = _printer(program, layout, buffers)
    body = [f"{printer.load(b)} = {_load(b, layout, buffers)}" for b in printer.loads()]
    body += [f"{name} = {_bare(text)}" for name, text in printer.lines()]
    body += [_store(s.buffer, _bare(printer.text(s.value)), layout, buffers) for s in printer.stage.stores]
    scalars = [f"{printer.column(i)} = {_scalar(program, layout, i)}" for i in printer.columns_used()]
    title = f"{program.name}: the cpu kernel for {layout.text()}. Printed by rulec."
    return _source(title, _addresses(buffers) + scalars, body, len(program.scalars.columns))


def limit_source(program: Program, layout: Layout) -> str:
    """A kernel that reads and writes the same arrays and computes nothing: the most that memory allows.

    Every load goes into every store through an exclusive or, which costs nothing beside the memory, so that LLVM can
    leave none of them out. What it writes has no meaning.
    """
    buffers = _elementwise_buffers(program)
    printer = _printer(program, layout, buffers)
    stored = [s.buffer for s in printer.stage.stores]
    read = [f"load_bits_{layout.dtype(b)}({_address(b)}, i, {_index(b, buffers)})" for b in printer.loads()]
    body = [f"bits = {' ^ '.join(read)}"]
    body += [f"store_bits_{layout.dtype(b)}({_address(b)}, i, bits, {_index(b, buffers)})" for b in stored]
    title = f"{program.name}: the memory traffic of its cpu kernel for {layout.text()}, alone. Printed by rulec."
    return _source(title, _addresses(buffers), body, 0)


def _source(title: str, before: Sequence[str], body: Sequence[str], columns: int) -> str:
    elements = [
        "@compiled",
        f"def elements({', '.join(_PARAMETERS[:-1])}):",
        '    """Elements start..stop of one tensor. Its buffers do not overlap."""',
        *(f"    {line}" for line in before),
        "    for i in range(start, stop):",
        *(f"        {line}" for line in body),
    ]
    text = "\n".join(elements) + "\n\n" + _KERNEL.replace("<row bytes>", str(8 * columns))
    return f'"""{title}"""\n\n{_imports(text)}\n\n\n{text}'


def _imports(text: str) -> str:
    used = set(re.findall(r"\w+", text))
    floats = [name for name in ("inf", "nan") if name in used]
    lines = [f"from math import {', '.join(floats)}\n"] if floats else []
    names = ", ".join(sorted(used & NAMES))
    wrapped = textwrap.fill(names, 112, initial_indent="    ", subsequent_indent="    ", break_long_words=False)
    return "\n".join([*lines, f"from rulec_backends.cpu_words import (\n{wrapped},\n)"])


def _elementwise_buffers(program: Program) -> list[Buffer]:
    require_elementwise("cpu", program)
    buffers = kernel_buffers(program)
    for buffer in buffers:
        if buffer.role == "input":
            raise BackendUnsupported("cpu", f"the input {buffer.name!r}", program.name)
        if not buffer.axes.elementwise:
            raise BackendUnsupported("cpu", f"the state {buffer.name!r}, which is not kept per element,", program.name)
    return buffers


def _printer(program: Program, layout: Layout, buffers: Iterable[Buffer]) -> _Printer:
    stage = require_elementwise("cpu", program)
    reserved = NAMES | {*_PARAMETERS, "inf", "nan", "elements", "kernel", "word"} | {_address(b.name) for b in buffers}

    def constant(value: float) -> str:
        text = repr(value) if math.isfinite(value) else ("nan" if math.isnan(value) else "inf" if value > 0 else "-inf")
        return text if layout.compute == "float64" else f"float32({text})"

    return _Printer("cpu", program, stage, OPS, constant, _loaded, frozenset(reserved))


class _Printer(StagePrinter):
    """The shared printer, and powers with a constant exponent as multiplications and roots."""

    def text(self, value: Node, defining: bool = False) -> str:
        if value.op is Op.POW and value.args[1].op is Op.CONST and (defining or value not in self.names):
            word = _POWERS.get(float(value.args[1].arg))  # type: ignore[arg-type]
            if word is not None:
                return f"{word}({_bare(self.text(value.args[0]))})"
        return super().text(value, defining)


def _bare(text: str) -> str:
    """An expression with no more parentheses than it needs."""
    return ast.unparse(ast.parse(text, mode="eval"))


def _loaded(buffer: str) -> str:
    name = identifier(buffer)
    return f"{name}_" if name in NAMES or name in _PARAMETERS else name


def _address(buffer: str) -> str:
    return f"{identifier(buffer)}_at"


def _index(buffer: str, buffers: Sequence[Buffer]) -> int:
    return next(i for i, b in enumerate(buffers) if b.name == buffer)


def _addresses(buffers: Sequence[Buffer]) -> list[str]:
    places = ["tensor", "tensors + tensor", *(f"{i} * tensors + tensor" for i in range(2, len(buffers)))]
    return [f"{_address(b.name)} = word(pointers, {place})" for b, place in zip(buffers, places, strict=False)]


def _load(buffer: str, layout: Layout, buffers: Sequence[Buffer]) -> str:
    storage = layout.dtype(buffer)
    text = f"load_{storage}({_address(buffer)}, i, {_index(buffer, buffers)})"
    if layout.compute == "float64" and storage != "float64":
        text = f"float64({text})"
    return f"-{text}" if layout.maximize and buffer == "g" else text


def _scalar(program: Program, layout: Layout, column: int) -> str:
    """A column of the table, where truth is 1 and 0, in the compute dtype or as true or false."""
    number = f"number(row, {column})"
    return f"{number} != 0.0" if is_boolean(program.scalars.columns[column].value) else f"{layout.compute}({number})"


def _store(buffer: str, value: str, layout: Layout, buffers: Sequence[Buffer]) -> str:
    return f"store_{layout.dtype(buffer)}({_address(buffer)}, i, {value}, {_index(buffer, buffers)})"
