"""The names and lines of one stage in Triton, for loops over blocks and loops over tiles."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from rulec.backend.printer import StagePrinter, bare, unique_name
from rulec.compiler.ir import Program, Result, Stage
from rulec.compiler.layout import Layout
from rulec.kernel.nest import Nest
from rulec.kernel.place import ELEMENT, ROW, TENSOR, address_lines
from rulec.language.expr.node import Node, Op, is_boolean, walk

from ..common.partial import counted, partial_sums
from ..common.text import left_by
from .ops import constant, is_bare, operations
from .packs import MOST
from .plan import known_columns, moving_columns, vector_width, wide_arrays
from .words import WORDS

#: Names in every printed file.
RESERVED = frozenset(
    {
        "tl", "triton", "float", "range", "None", "True", "False", "chunks", "known", "moving", "table", "stays",
        "scale", "slots", "chunk", "tensor", "number", "row", "values", "size", "span", "first", "last", "whole",
        "aligned", "block", "i", "inside", "writable", "write", "unscale", "matrix", "left", "top", "middle", "bottom",
        "batch", "height", "width", "lines", "tile", "across", "deep", "piece", "start", "plane", "down", "along",
        "line", "rows", "columns", "column", "beside", "below", "jobs", "results", "finish", "scalars",
        "ALL", "BLOCK", "VECTOR", "MATRICES", "ROWS", "COLUMNS", "WIDE", "EMULATED",
    }
    | set(WORDS)
)  # fmt: skip

#: The first value of a reduction.
NOTHING = {Op.SUM: "0.0", Op.MIN: 'float("inf")', Op.MAX: '-float("inf")'}

_JOINED = {
    Op.SUM: "{} + {}",
    Op.MIN: "tl.minimum({}, {}, propagate_nan=tl.PropagateNan.ALL)",
    Op.MAX: "tl.maximum({}, {}, propagate_nan=tl.PropagateNan.ALL)",
}
_WHOLE = {Op.SUM: "tl.sum", Op.MIN: "lowest", Op.MAX: "highest"}


class StageSource:
    """The names of a stage's values, addresses and reductions, and the lines that load, compute, store and reduce.

    `names` are the variables of buffers' old values, vectors and reductions; `at` of their addresses, or of slots. With
    `works_on`, all values of a tensor that stays as it is are computed, and only its stores left out. With
    `gradient_in_memory`, the gradient is read from its address; else `gradient` gives its expression. `local_names` are
    further names in the functions of such a stage. `elements` is the size of a block or tile. With `narrow_gradient`,
    the gradient may lie at any address, and the other arrays still move 16 bytes at a time.
    """

    elements = "BLOCK"
    works_on = False
    gradient_in_memory = True
    narrow_gradient = False
    local_names: frozenset[str] = frozenset()

    def __init__(self, program: Program, layout: Layout, index: int) -> None:
        self.program, self.layout, self.index = program, layout, index
        self.stage: Stage = program.stages[index]
        self.compute = layout.compute
        functions = {f"stage_{i}{part}" for i in range(len(program.stages)) for part in PARTS}
        taken = {*RESERVED, *self.local_names, *functions}
        lines = address_lines(program)
        self.names = {name: unique_name(name, taken) for name in lines}
        self.at = {name: unique_name(f"{self.names[name]}_at", taken) for name in lines}
        self.rest = {r.name: unique_name(f"{self.names[r.name]}_rest", taken) for r in self.stage.reduces}
        self.printer = StagePrinter(
            "triton", program, self.stage, operations(self.compute), lambda v: constant(v, self.compute),
            self.names.__getitem__, frozenset(taken), self.names.__getitem__,
            quotient="quotient({}, {}, {})" if self.compute == "float32" else "",
        )  # fmt: skip
        self.scalars = {self.printer.column(i): i for i in self.printer.columns_used()}
        self.known, self.moving = known_columns(program, self.stage, layout), moving_columns(program, self.stage)
        self.nest = Nest(program, layout, self.stage)
        self.buffers = self.nest.buffers
        #: The sums that are added up in packs of so many neighbouring elements first.
        self.in_packs = {r.name for r in partial_sums(program, layout, self.stage) if self.nest.place(r) == TENSOR}
        self.pack = min(MOST, vector_width(program, self.stage, layout))
        self.arrays = [*self.buffers, *self.stage.reads]
        self.scaled = "g" in self.printer.loads()
        kept = [s for s in self.stage.stores if program.buffer(s.buffer).role != "scratch"]
        #: Whether the stage has both work for a tensor that stays as it is, and stores to leave out.
        self.guarded = bool(kept) and (self.works_on or bool(self.stage.reduces) or len(kept) < len(self.stage.stores))
        self.emulates = any(layout.dtype(s.buffer) == "bfloat16" for s in self.stage.stores)

    # The kernel's own lines

    def about_lines(self) -> list[str]:
        """The kernel's docstring: its work and its tables."""
        done = textwrap.wrap(f"One chunk of one tensor: stage {self.index} {left_by(self.stage)}.", 100)
        return [
            '"""' + done[0], *done[1:], "",
            "`chunks` has pairs of a tensor and one of its chunks. A line of `known` says how a tensor lies and is",
            "cut, and has addresses; one of `moving` its row of `table`, and the addresses that come with each call.",
            '"""',
        ]  # fmt: skip

    def address_lines(self) -> list[str]:
        """The variables for addresses and first slots, from the lines of the two tables."""
        reduced = [r.name for r in self.stage.reduces if self.nest.place(r) != ROW]
        fixed = [n for n in self.known if n in self.at and n not in reduced]
        lines = [f"{self.at[n]} = tl.load(known + {self.known.index(n)})" for n in fixed]
        return lines + [f"{self.at[n]} = tl.load(moving + {1 + i})" for i, n in enumerate(self.moving)]

    def slots(self, reduction: Result) -> str:
        """The place of a reduction's first slot, read at the one store of a chunk."""
        return f"tl.load(known + {self.known.index(reduction.name)})"

    def scalar_lines(self) -> list[str]:
        """The variables for columns of the scalar table."""
        return [f"{name} = {self._scalar(column)}" for name, column in self.scalars.items()]

    def _scalar(self, column: int) -> str:
        text = f"tl.load(values + {column})"
        truth = is_boolean(self.program.columns[column].value)
        return self._true(text) if truth else f"{text}.to(tl.{self.compute})"

    @staticmethod
    def _true(text: str) -> str:
        # Through an integer: in the interpreter, a comparison has the dtype of its operands.
        return f"{text}.to(tl.int32) != 0"

    def aligned(self, arrays: Sequence[str]) -> str:
        """The expression for whether all these arrays lie at multiples of 16 bytes, a narrow gradient left out."""
        return f"({' | '.join(self.at[a] for a in arrays if not self._is_narrow(a))}) % 16 == 0"

    def _is_narrow(self, array: str) -> bool:
        return array == "g" and self.narrow_gradient

    # The lines of a loop

    def pointer_lines(self) -> list[str]:
        """Addresses as pointers; with ALL, pointers to neighbouring elements are aligned."""
        wide = wide_arrays(self.program, self.stage, self.layout)
        arrays = [a for a in self.arrays if a != "g" or self.gradient_in_memory]
        casts = {a: f"{self.at[a]}.to(tl.pointer_type(tl.{self._storage(a)}))" for a in arrays}
        wide = [a for a in wide if not self._is_narrow(a)]
        texts = {a: f"tl.multiple_of({cast}, 16 if ALL else 1)" if a in wide else cast for a, cast in casts.items()}
        return [f"{self.at[a]} = {text}" for a, text in texts.items()]

    def _storage(self, name: str) -> str:
        return self.layout.result(name) if name in self.stage.reads else self.layout.dtype(name)

    def before_lines(self) -> list[str]:
        """The values of all elements: inverses of divisors, the factor of gradients, and whether to store."""
        lines = [f"{inverse} = reciprocal({divisor})" for divisor, inverse in self.printer.inverses().items()]
        if self.scaled:
            lines += ["if scale is not None:", "    unscale = tl.div_rn(1.0, tl.load(scale))"]
        if self.guarded:
            lines += ["if stays is not None:", "    write = tl.load(stays + row) == 0"]
        return lines

    def load_lines(self) -> list[str]:
        """The variables for each buffer's old elements, in the compute dtype."""
        lines = []
        for buffer in self.printer.loads():
            name = self.names[buffer]
            lines.append(f"{name} = {self._load(buffer)}")
            if buffer == "g":
                factor = "unscale" if self.compute == "float32" else f"unscale.to(tl.{self.compute})"
                lines += ["if scale is not None:", f"    {name} = {name} * {factor}"]
        return lines

    def _load(self, buffer: str) -> str:
        if buffer != "g":
            return self._read(buffer)
        return f"-{self.gradient()}" if self.layout.maximize else self.gradient()

    def gradient(self) -> str:
        """The elements of the gradient in the compute dtype, by default from memory."""
        return self._read("g")

    def _read(self, buffer: str) -> str:
        return self.computed(f"tl.load({self.at[buffer]} + start + i, mask=inside)", self.layout.dtype(buffer))

    def computed(self, text: str, dtype: str) -> str:
        """Elements of a dtype in the compute dtype."""
        return text if dtype == self.compute else f"{text}.to(tl.{self.compute})"

    def vector_lines(self, where: str, index: str, mask: str) -> list[str]:
        """The variables for vectors with values at this place."""
        return [self._vector(v, index, mask) for v in self.nest.read(where)]

    def _vector(self, vector: Result, index: str, mask: str) -> str:
        text = f"tl.load({self.at[vector.name]} + {index}, mask={mask})"
        text = self.computed(text, self.layout.result(vector.name))
        return f"{self.names[vector.name]} = {self._true(text) if is_boolean(vector.value) else text}"

    def value_lines(self) -> list[str]:
        """The variables for named values."""
        return [f"{name} = {bare(text)}" for name, text in self.printer.lines()]

    def store_lines(self) -> list[str]:
        """The statements that store elements, after all values: no store changes the operand of another."""
        lines = []
        if self.guarded:
            lines.append("writable = inside if stays is None else (write if ALL else inside & write)")
        return lines + [self._store(s.buffer, bare(self.printer.text(s.value))) for s in self.stage.stores]

    def _store(self, buffer: str, value: str) -> str:
        if self.layout.dtype(buffer) == "bfloat16" and not is_bare(value):
            value = f"{value}.to(tl.float32)" if self.compute == "float64" else value
            value = f"to_bfloat16({value}, EMULATED)"
        elif self.layout.dtype(buffer) in ("int16", "int8"):
            value = f"{value}.to(tl.{self.layout.dtype(buffer)})"
        kept = self.guarded and self.program.buffer(buffer).role != "scratch"
        return f"tl.store({self.at[buffer]} + start + i, {value}, mask={'writable' if kept else 'inside'})"

    # Reductions

    def zero(self, reduction: Result, shape: str) -> str:
        """The first value of a reduction in this shape, or in that of packs.

        Of a sum in float64; of a count in packs in float32, exact up to 2**24; of others in the compute dtype.
        """
        packed = reduction.name in self.in_packs
        shape = f"({self.elements} // {self.pack},)" if packed else shape
        narrow = reduction.value.op is not Op.SUM or (packed and counted(reduction.value.args[0]))
        dtype = self.compute if narrow else "float64"
        return f"{self.names[reduction.name]} = tl.full({shape}, {NOTHING[reduction.value.op]}, tl.{dtype})"

    def taken_in(self, reduction: Result, shape: str) -> str:
        """The statement that joins a block or tile of elements to a reduction."""
        name = self.names[reduction.name]
        part = self._packed(reduction, shape) if reduction.name in self.in_packs else self.operand(reduction, shape)
        return f"{name} = {bare(self.joined(reduction, name, part))}"

    def _packed(self, reduction: Result, shape: str) -> str:
        """The operand of a sum in packs: the sum of each."""
        operand = reduction.value.args[0]
        if operand.op is Op.MUL and operand not in self.printer.names and all(map(self._has_elements, operand.args)):
            x, y = (f"in_packs({bare(self.printer.text(factor))}, inside)" for factor in operand.args)
            return f"pack_products({x}, {y}, None, {self.pack}).to(tl.float64)"
        sums = f"pack_sums(in_packs({self._in_shape(operand, shape)}, inside), {self.pack})"
        return sums if counted(operand) else f"{sums}.to(tl.float64)"

    def _in_shape(self, operand: Node, shape: str) -> str:
        text = bare(self.printer.text(operand))
        return text if self._has_elements(operand) else f"tl.full({shape}, 0.0, tl.{self.compute}) + {text}"

    def operand(self, reduction: Result, shape: str) -> str:
        """The operand of a reduction: its first value where `inside` is false; a sum's in float64."""
        operand, op = reduction.value.args[0], reduction.value.op
        text = self._in_shape(operand, shape)
        text = f"({text} if ALL else tl.where(inside, {text}, {NOTHING[op]}))"
        return f"{text}.to(tl.float64)" if op is Op.SUM and self.compute != "float64" else text

    def _has_elements(self, value: Node) -> bool:
        """Whether a value has a number for each element of a tile, not only for its rows or columns."""
        elements = {v.name for v in self.nest.read(ELEMENT)}
        parts = walk([value])
        return any(n.op is Op.LOAD or (n.op is Op.RESULT and str(n.arg) in elements) for n in parts)

    @staticmethod
    def joined(reduction: Result, a: str, b: str) -> str:
        """Two parts of a reduction joined."""
        return _JOINED[reduction.value.op].format(a, b)

    def total(self, reduction: Result, value: str, axis: str = "None") -> str:
        """A block or tile reduced along an axis, or to one number."""
        if reduction.name in self.in_packs:
            return f"tl.sum({value}.to(tl.float64))"
        word = _WHOLE[reduction.value.op]
        return f"{word}({value})" if axis == "None" else f"{word}({value}, {axis}, True)"


def has_narrow(program: Program, stage: Stage, layout: Layout) -> bool:
    """Whether a stage has a kernel for gradients at any address beside aligned arrays: it needs both."""
    wide = wide_arrays(program, stage, layout)
    return "g" in wide and len(wide) > 1


#: The suffixes of a stage's functions.
PARTS = ("", "_blocks", "_tiles", "_chunk")


def indented(lines: Sequence[str], depth: int = 1) -> list[str]:
    """Lines inside a block."""
    return ["    " * depth + line if line else line for line in lines]


def call(function: str, arguments: Sequence[str], end: str = "") -> list[str]:
    """`function(arguments)` on as many lines as it needs."""
    line = f"{function}({', '.join(arguments)}){end}"
    if len(line) <= 108:
        return [line]
    lines = [""]
    for argument in arguments:
        if len(lines[-1]) + len(argument) > 100:
            lines.append("")
        lines[-1] += f"{argument}, "
    return [f"{function}(", *indented([x.rstrip() for x in lines]), f"){end}"]
