"""Prints one stage of a program: the names of its arrays and values, and the words that load and store them."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable

from rulec.backend.printer import OpTable, StagePrinter, bare, unique_name
from rulec.compiler.ir import Program, Result, Stage
from rulec.compiler.layout import Layout
from rulec.kernel.multi_tensor.chunks import CHUNK_COLUMNS
from rulec.kernel.nest import Nest
from rulec.kernel.place import COL, ELEMENT, MATRIX, ROW, TENSOR, address_lines
from rulec.language.expr.node import Node, Op, is_boolean
from rulec.language.expr.ops import FUNCTIONS as ELEMENTWISE
from rulec.language.expr.ops import SPECS

from ..common.text import chance_call
from .partial import PartialSums, in_blocks
from .words import FUNCTIONS, NAMES

OPS: OpTable = {
    Op.ADD: "({} + {})", Op.SUB: "({} - {})", Op.MUL: "({} * {})", Op.DIV: "({} / {})", Op.NEG: "(-{})",
    Op.POW: "power({}, {})", Op.MOD: "remainder({}, {})", Op.FLOORDIV: "floor({} / {})",
    Op.LT: "({} < {})", Op.LE: "({} <= {})", Op.GT: "({} > {})", Op.GE: "({} >= {})", Op.EQ: "({} == {})",
    Op.NE: "({} != {})", Op.AND: "({} & {})", Op.OR: "({} | {})", Op.NOT: "(not {})", Op.WHERE: "where({}, {}, {})",
    Op.ABS: "magnitude({})", Op.AWAY: "away({}, {})", Op.ULPS: "ulps({}, {})", Op.COARSE: "coarse({}, {})",
    # The functions that are words under their own names.
    **{op: f"{op.symbol}({', '.join(['{}'] * SPECS[op].arity)})" for op in ELEMENTWISE if op.symbol in FUNCTIONS},
}  # fmt: skip

#: Words for single exponents: faster than `power`, and as accurate. Small whole exponents are products already.
_POWERS = {-1.0: "inverse", -2.0: "inverse_square", 0.5: "root", -0.5: "inverse_root"}

#: The word that joins one more number to a reduction, and the reduction of no numbers.
_REDUCTIONS = {Op.SUM: ("accumulate", "0.0"), Op.MIN: ("lowest", "inf"), Op.MAX: ("highest", "-inf")}

#: The index of a value of elements, rows, columns or matrices, in the loops of a stage that sees matrices.
INDEX = {ELEMENT: "i", ROW: "line", COL: "j", MATRIX: "matrix"}

#: The dtypes of elements that are ordinary numbers as they are loaded.
_ORDINARY = ("bfloat16", "int16", "int8")

_LOCALS = {
    "i", "j", "inf", "nan", "range", "elements", "kernel", "mask", "others", "mixed", "float", "pointers", "tensors",
    "row", "start", "stop", "part", "count", "first", "last", "min", "floats", "place", "chunk", "matrix", "line",
    "back", "block", *CHUNK_COLUMNS,
}  # fmt: skip


class StageWriter:
    """The names of one stage's buffers, vectors, reductions and addresses, and the words that load and store them.

    `names` are the variables of buffers' old values, vectors and reductions; `at` of their addresses. None of them is a
    word of kernels or in `reserved`.
    """

    def __init__(self, program: Program, layout: Layout, stage: Stage, reserved: Collection[str] = ()) -> None:
        self.program, self.layout, self.stage, self.nest = program, layout, stage, Nest(program, layout, stage)
        self.lines = address_lines(program)
        taken = set(NAMES) | _LOCALS | set(reserved) | {f"stage_{i}" for i in range(len(program.stages))}
        self.names = {name: unique_name(name, taken) for name in self.lines}
        self.at = {name: unique_name(f"{self.names[name]}_at", taken) for name in self.lines}
        coded = [name for name, _ in layout.formats]
        #: The variables of the addresses of codes and of scales, by state.
        self.codes = {name: unique_name(f"{name}_codes", taken) for name in coded}
        self.scales = {name: unique_name(f"{name}_scales", taken) for name in coded}
        sums = [] if self.shares_columns else in_blocks(program, layout, stage)
        parts = {r.name: unique_name(f"part_of_{self.names[r.name]}", taken) for r in sums}
        self._taken = taken
        self.printer = _Printer(
            "cpu",
            program,
            stage,
            {**OPS, Op.CHANCE: self._chance},
            self._constant,
            self.names.__getitem__,
            frozenset(taken),
            self.names.__getitem__,
        )
        kept = [b for b in self.nest.buffers if b not in (*self.nest.stored, *coded)]
        self.tame, self.tames_stores = self._tamed_places()
        self.partial = PartialSums(sums, parts, self.names, self.printer, self.load, kept)

    def _tamed_places(self) -> tuple[bool, bool]:
        """Whether numbers are made ordinary as they are loaded, or else the new elements as they are stored.

        A bfloat16 is stored in fewer instructions where no NaN has odd bits: see cpu_storage. The fewer places count.
        """
        dtype = self.layout.dtype
        stored = [s.buffer for s in self.stage.stores if dtype(s.buffer) == "bfloat16"]
        loaded = [b for b in self.printer.loads() if dtype(b) not in _ORDINARY]
        if self.layout.compute != "float32" or not stored:
            return False, False
        fewer = len(stored) < len(loaded) + len(self.nest.read(*INDEX))
        return not fewer, fewer

    @property
    def shares_columns(self) -> bool:
        """Whether the rows of the stage share totals of columns, or values of columns that it only reduces.

        A stage that stores waits for memory, whether its rows share values of columns or not.
        """
        return bool(self.nest.totals(COL) or (self.nest.read(COL) and not self.stage.stores))

    def unique(self, text: str) -> str:
        """A variable that nothing in the text of the stage has."""
        printer = self.printer
        self._taken |= {*printer.names.values(), *map(printer.column, printer.columns_used())}
        return unique_name(text, self._taken)

    def _chance(self, _: str, *words: str) -> str:
        first = "line * width + left" if self.nest.shaped else "start"
        # In a stage with states in codes, `i` counts the elements of a part.
        parted = any(self.layout.format(buffer) for buffer in self.nest.buffers)
        return chance_call(["part + i", "part"] if parted else ["i", first], words)

    def _constant(self, value: float) -> str:
        text = repr(value) if math.isfinite(value) else ("nan" if math.isnan(value) else "inf" if value > 0 else "-inf")
        return f"{self.layout.compute}({text})"

    # Lines before the loops

    def address_lines(self) -> list[str]:
        """The addresses of the stage's arrays, from a table with a line of all tensors for each name."""
        return self.addresses({*self.nest.buffers, *self.stage.reads, *(r.name for r in self.stage.reduces)})

    def addresses(self, names: Collection[str]) -> list[str]:
        """The addresses of these arrays."""
        return [f"{self.at[name]} = {self.address(name)}" for name in self.lines if name in names]

    def address(self, name: str) -> str:
        index = self.lines.index(name)
        start = ("tensor", "tensors + tensor")[index] if index < 2 else f"{index} * tensors + tensor"
        column = {ROW: "row_slots", COL: "col_slots"}.get(self._slots(name))
        return f"word(pointers, {start})" + (f" + 8 * word(place, {CHUNK_COLUMNS.index(column)})" if column else "")

    def _slots(self, name: str) -> str:
        """The place of a reduction, empty for any other name."""
        return next((self.nest.place(r) for r in self.stage.reduces if r.name == name), "")

    def scalar_lines(self) -> list[str]:
        """The variables for columns of the scalar table."""
        return [f"{self.printer.column(i)} = {self._scalar(i)}" for i in self.printer.columns_used()]

    def _scalar(self, column: int) -> str:
        """A column of the table, in the compute dtype, or as a truth where it has 1 and 0."""
        number = f"number(row, {column})"
        if is_boolean(self.program.columns[column].value):
            return f"{number} != 0.0"
        return self._tamed(f"{self.layout.compute}({number})")

    def _tamed(self, text: str) -> str:
        return f"ordinary({text})" if self.tame else text

    # Values of the parameter's shape

    def load_lines(self, copy: int = 0) -> list[str]:
        """The variables for each buffer's old element, in the compute dtype."""
        return [f"{self.names[b]} = {self.load(b, copy=copy)}" for b in self.printer.loads()]

    def load(self, buffer: str, word: str = "", copy: int = 0) -> str:
        """A buffer's old element in the compute dtype, read by this word or by the one for its dtype."""
        storage = self.layout.dtype(buffer)
        text = f"{word or f'load_{storage}'}({self.element(buffer, copy=copy)})"
        if self.layout.compute == "float64" and storage != "float64":
            text = f"float64({text})"
        if storage not in _ORDINARY:
            text = self._tamed(text)
        return f"-{text}" if self.layout.maximize and buffer == "g" else text

    def value_lines(self) -> list[str]:
        """The variables for named values."""
        return [f"{name} = {bare(text)}" for name, text in self.printer.lines()]

    def store_lines(self) -> list[str]:
        """The statements that store elements."""
        return [self.store_line(s.buffer, bare(self.printer.text(s.value))) for s in self.stage.stores]

    def store_line(self, buffer: str, value: str, copy: int = 0) -> str:
        """The statement that stores an element of a value; `copy` is as in `element`."""
        dtype = self.layout.dtype(buffer)
        text = f"ordinary({value})" if self.tames_stores and dtype == "bfloat16" else value
        return f"store_{dtype}({self.element(buffer, copy=copy)}, {text})"

    def arithmetic_lines(self) -> list[str]:
        """The statements for one element after its loads: its values, its stores, and what reductions take in."""
        return [*self.value_lines(), *self.store_lines(), *self.reduce_lines()]

    def element(self, name: str, index: str = "i", copy: int = 0) -> str:
        """Address, index and number of an array: LLVM knows that arrays of different numbers do not overlap.

        If a loop has elements of several rows, each row of a stored array has a number: `copy` counts the rows.
        """
        number = self.lines.index(name)
        if copy and name in self.nest.stored:
            number = len(self.lines) + (copy - 1) * len(self.nest.stored) + self.nest.stored.index(name)
        return f"{self.at[name]}, {index}, {number}"

    # Bits of the same elements, for the limit

    def moved(self) -> list[str]:
        """The buffers and vectors with all elements loaded in the stage."""
        return [*self.printer.loads(), *(v.name for v in self.nest.read(ELEMENT))]

    def load_bits_lines(self) -> list[str]:
        """The variables for the bits of loaded elements."""
        return [f"{self.names[n]} = load_bits_{self.storage(n)}({self.element(n)})" for n in self.moved()]

    def store_bits(self, buffer: str, bits: str) -> str:
        """The statement that stores the low bits as an element."""
        return f"store_bits_{self.storage(buffer)}({self.element(buffer)}, {bits})"

    def store_zero(self, reduction: str, index: str, bits: str) -> str:
        """The statement that stores bits, all zero, in a slot."""
        return f"store_bits_float64({self.element(reduction, index)}, {bits})"

    def storage(self, name: str) -> str:
        return self.layout.compute if name in self.stage.reads else self.layout.dtype(name)

    # Vectors

    def vector_lines(self, *places: str, line: str = INDEX[ROW]) -> list[str]:
        """The variables for vectors with values at one of these places; `line` is the index of the row."""
        index = {**INDEX, ROW: line}
        return [f"{self.names[v.name]} = {self._vector(v, index[self.nest.place(v)])}" for v in self.nest.read(*places)]

    def _vector(self, vector: Result, index: str) -> str:
        text = f"load_{self.layout.compute}({self.element(vector.name, index)})"
        return f"{text} != 0.0" if is_boolean(vector.value) else self._tamed(text)

    # Reductions

    def begin_lines(self, totals: Iterable[Result]) -> list[str]:
        """The variables of reductions before a loop, with their first values."""
        return [f"{self.names[r.name]} = {self._nothing(r)}" for r in totals]

    def _nothing(self, reduction: Result) -> str:
        nothing = _REDUCTIONS[reduction.value.op][1]
        return nothing if reduction.value.op is Op.SUM else f"{self.layout.compute}({nothing})"

    def reduce_lines(self) -> list[str]:
        """The statements that join one element to reductions: in variables, then in slots of columns."""
        kept = self.nest.totals(ROW, TENSOR)
        lines = [line for r in kept for line in self._kept_lines(r)]
        slots = [(r, self.element(r.name, "j")) for r in self.nest.totals(COL)]
        return lines + [f"store_float64({slot}, {self._taken_in(r, f'load_float64({slot})')})" for r, slot in slots]

    def _kept_lines(self, reduction: Result) -> list[str]:
        if reduction.name in self.partial.variables:
            return self.partial.lines(reduction)
        name = self.names[reduction.name]
        return [f"{name} = {self._taken_in(reduction, name)}"]

    def _taken_in(self, reduction: Result, so_far: str) -> str:
        return self.joined(reduction, so_far, bare(self.printer.text(reduction.value.args[0])))

    def joined(self, reduction: Result, so_far: str, value: str) -> str:
        """A reduction that takes in one more value."""
        return f"{_REDUCTIONS[reduction.value.op][0]}({so_far}, {value})"

    def end_lines(self, totals: Iterable[Result], index: str) -> list[str]:
        """The statements that store the variables of reductions in slots."""
        return [f"store_float64({self.element(r.name, index)}, {self.names[r.name]})" for r in totals]

    def empty_lines(self, totals: Iterable[Result]) -> list[str]:
        """The statements that write first values into the slots of a column."""
        slots = [(self.element(r.name, "j"), _REDUCTIONS[r.value.op][1]) for r in totals]
        return [f"store_float64({slot}, float64({nothing}))" for slot, nothing in slots]


class _Printer(StagePrinter):
    """The shared printer, with words for some constant exponents."""

    def text(self, value: Node, defining: bool = False) -> str:
        if value.op is Op.POW and value.args[1].op is Op.CONST and (defining or value not in self.names):
            word = _POWERS.get(float(value.args[1].arg))  # type: ignore[arg-type]
            if word is not None:
                return f"{word}({self.text(value.args[0])})"
        return super().text(value, defining)
