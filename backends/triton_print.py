"""Prints a program as Triton source: a function of the elements of one chunk, and the kernel that runs all chunks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from rulec.backend.layout import Layout
from rulec.backend.printer import (
    OpTable,
    StagePrinter,
    bare,
    buffer_names,
    elementwise_buffers,
    is_number,
    unique_name,
)
from rulec.compiler.ir import Program
from rulec.language.node import Op, is_boolean

from .triton_words import WORDS, words_used

#: Names that a printed file uses for itself.
_RESERVED = frozenset(
    {
        "tl", "triton", "float", "i", "inside", "elements", "step", "chunk", "tensor", "start", "row", "size",
        "addresses", "gradients", "sizes", "chunks", "index", "table", "CHUNK", "ALIGNED", "EMULATED",
    }
    | set(WORDS["float32"])
    | set(WORDS["float64"])
)  # fmt: skip

_OPERATORS: OpTable = {
    Op.ADD: "({} + {})", Op.SUB: "({} - {})", Op.MUL: "({} * {})", Op.NEG: "(-{})",
    Op.LT: "({} < {})", Op.LE: "({} <= {})", Op.GT: "({} > {})", Op.GE: "({} >= {})", Op.EQ: "({} == {})",
    Op.NE: "({} != {})", Op.AND: "({} & {})", Op.OR: "({} | {})", Op.NOT: "({} == 0)",
    Op.ABS: "tl.abs({})", Op.FLOOR: "tl.floor({})", Op.ISFINITE: '(tl.abs({}) < float("inf"))',
}  # fmt: skip
_WORDS: Mapping[Op, str] = {
    Op.POW: "power", Op.MOD: "remainder", Op.CBRT: "cbrt", Op.SIGN: "sign", Op.EXP: "exp", Op.LOG: "log",
    Op.TANH: "tanh", Op.SIGMOID: "sigmoid", Op.ERF: "erf",
}  # fmt: skip


def operations(compute: str) -> OpTable:
    """The table for code computed in float32 or float64: Triton's `/`, `sqrt` and `maximum` alone are not IEEE's."""

    def typed(text: str) -> str:
        return f"tl.full((), {text}, tl.{compute})" if _is_bare(text) else text

    def call(function: str, last: str = "") -> Callable[..., str]:
        return lambda *operands: f"{function}({', '.join(map(typed, operands))}{last})"

    narrow = compute == "float32"
    quotient = "tl.div_rn({}, {})" if narrow else "({} / {})"
    root = "tl.sqrt_rn({})" if narrow else "tl.sqrt({})"
    propagate = ", propagate_nan=tl.PropagateNan.ALL"
    return {
        **_OPERATORS,
        **{op: call(name) for op, name in _WORDS.items()},
        Op.DIV: quotient,
        Op.FLOORDIV: f"tl.floor({quotient})",
        Op.SQRT: root,
        Op.RSQRT: quotient.format("1.0", root),
        Op.WHERE: call("tl.where"),
        Op.MINIMUM: call("tl.minimum", propagate),
        Op.MAXIMUM: call("tl.maximum", propagate),
    }


def _is_bare(text: str) -> bool:
    """Whether a printed expression is a number without a dtype."""
    return is_number(text) or text.removeprefix("-").startswith("float(")


def constant(value: float, compute: str) -> str:
    """A number as text: bare where Triton, which reads it as float32, has all of it, else with its dtype."""
    if not np.isfinite(value):
        return f'{"-" if value < 0 else ""}float("{"nan" if np.isnan(value) else "inf"}")'
    with np.errstate(all="ignore"):
        single = float(np.float32(value))
    normal = value == 0 or (abs(value) >= 2.0**-126 and np.isfinite(single))
    if normal and (compute == "float32" or single == value):
        return repr(value)
    return f"tl.full((), {value!r}, tl.{compute})"


class KernelPrinter:
    """One program for one layout as Triton source."""

    def __init__(self, program: Program, layout: Layout) -> None:
        self.program, self.layout = program, layout
        self.buffers = [b.name for b in elementwise_buffers("triton", program)]
        taken = set(_RESERVED)
        self.values = buffer_names(program, taken)
        taken |= set(self.values.values())
        self.places = {b: unique_name(f"{b}_at", taken) for b in self.buffers}
        self.printer = StagePrinter(
            "triton", program, program.stages[0], operations(layout.compute), lambda v: constant(v, layout.compute),
            self.values.__getitem__, frozenset(taken),
        )  # fmt: skip
        self.scalars = {self.printer.column(i): i for i in self.printer.columns_used()}

    def source(self) -> str:
        """The whole file."""
        elements = "\n".join(self._elements())
        text = "\n\n\n".join([elements, "\n".join(self._kernel())])
        words = words_used(text, self.layout.compute)
        title = f'"""{self.program.name} by the triton backend: {self.layout.text()}. Printed by rulec."""'
        head = "\n".join([title, "", "import triton", "import triton.language as tl"])
        return "\n\n\n".join([head, *(w.rstrip("\n") for w in words), text]) + "\n"

    def _elements(self) -> list[str]:
        """The function of one chunk's elements."""
        printer = self.printer
        body = [f"{self.values[b]} = {self._load(b)}" for b in printer.loads()]
        body += [f"{name} = {bare(text)}" for name, text in printer.lines()]
        # Every value is computed before the first is stored: stores cannot change what another reads.
        stores = [self._store(s.buffer, bare(printer.text(s.value))) for s in printer.stage.stores]
        parameters = ["i", "inside", *self.places.values(), *self.scalars, "EMULATED: tl.constexpr"]
        summary = f'"""Elements `i` of one tensor, in {self.layout.compute}; all of them where `inside` is None."""'
        return ["@triton.jit", *_call("def elements", parameters, ":"), *_indented([summary, *body, *stores])]

    def _load(self, buffer: str) -> str:
        text = f"tl.load({self.places[buffer]} + i, mask=inside)"
        if self.layout.dtype(buffer) != self.layout.compute:
            text += f".to(tl.{self.layout.compute})"
        return f"-{text}" if self.layout.maximize and buffer == "g" else text

    def _store(self, buffer: str, value: str) -> str:
        if self.layout.dtype(buffer) == "bfloat16" and not _is_bare(value):
            value = f"{value}.to(tl.float32)" if self.layout.compute == "float64" else value
            value = f"to_bfloat16({value}, EMULATED)"
        return f"tl.store({self.places[buffer]} + i, {value}, mask=inside)"

    def _kernel(self) -> list[str]:
        """The kernel: a program for each chunk, which finds its tensor, its row of scalars and its addresses."""
        columns = len(self.program.scalars.columns)
        body = [
            '"""One chunk of one tensor: `addresses` and `gradients` say where tensors lie, `sizes` how long they are,',
            "`chunks` holds (tensor, chunk of it) pairs, `index` each tensor's row of `table`.",
            '"""',
            "chunk = tl.program_id(0).to(tl.int64)",
            "tensor = tl.load(chunks + 2 * chunk)",
            "start = tl.load(chunks + 2 * chunk + 1) * CHUNK",
            "size = tl.load(sizes + tensor)",
            f"row = table + {columns} * tl.load(index + tensor)",
            *(f"{name} = {self._scalar(column)}" for name, column in self.scalars.items()),
            *(f"{self.places[b]} = {self._address(b)}" for b in self.buffers),
            "if ALIGNED:",
            *(f"    {place} = tl.multiple_of({place}, 16)" for place in self.places.values()),
            "i = start + tl.arange(0, CHUNK)",
            "if start + CHUNK <= size:",
            *_indented(_call("elements", ["i", "None", *self.places.values(), *self.scalars, "EMULATED"])),
            "else:",
            *_indented(_call("elements", ["i", "i < size", *self.places.values(), *self.scalars, "EMULATED"])),
        ]
        tables = ["addresses", "gradients", "sizes", "chunks", "index", "table"]
        switches = [f"{name}: tl.constexpr" for name in ("CHUNK", "ALIGNED", "EMULATED")]
        return ["@triton.jit", *_call("def step", [*tables, *switches], ":"), *_indented(body)]

    def _scalar(self, column: int) -> str:
        text = f"tl.load(row + {column})"
        truth = is_boolean(self.program.scalars.columns[column].value)
        # Through an integer, for the interpreter takes the dtype of what is compared for that of the truth.
        return f"{text}.to(tl.int32) != 0" if truth else f"{text}.to(tl.{self.layout.compute})"

    def _address(self, buffer: str) -> str:
        place = "gradients + tensor"
        if buffer != "g":
            others = [b for b in self.buffers if b != "g"]
            place = f"addresses + {len(others)} * tensor + {others.index(buffer)}"
        return f"tl.load({place}).to(tl.pointer_type(tl.{self.layout.dtype(buffer)}))"


def _indented(lines: Sequence[str]) -> list[str]:
    return [f"    {line}" for line in lines]


def _call(function: str, arguments: Sequence[str], end: str = "") -> list[str]:
    """`function(arguments)` on as many lines as it needs."""
    line = f"{function}({', '.join(arguments)}){end}"
    if len(line) <= 108:
        return [line]
    lines = [""]
    for argument in arguments:
        if len(lines[-1]) + len(argument) > 100:
            lines.append("")
        lines[-1] += f"{argument}, "
    return [f"{function}(", *_indented([x.rstrip() for x in lines]), f"){end}"]
