"""Prints a program's stages as functions of whole arrays, one line for each named value: for numpy, jax and mlx.

These backends differ in the spelling of their libraries and in the end of a step: it writes into its arrays, or returns
new ones. All arithmetic is in the layout's compute dtype.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from rulec.backend.printer import (
    OpTable,
    StagePrinter,
    bare,
    buffer_names,
    is_number,
    unique_name,
)
from rulec.compiler.ir import Program
from rulec.compiler.layout import Layout
from rulec.language.expr.node import Kind, Op, is_boolean
from rulec.language.expr.ops import having


@dataclass(frozen=True)
class Dialect:
    """The spelling of one array library.

    Functions are called through `module`. A step takes `parameters` before its arrays; its file begins with `imports`.
    `functions` maps a function that libraries lack or compute badly to its line of import. `cast` is a format of an
    array and a dtype, `number` of a number and a dtype, `copy` of an array. If `writes`, a step takes also the
    arrays only stored to. `others` maps operations to functions used in place of the module's. Rules with an operation
    that the library `lacks` are refused. Functions of bits take the library first, unless the file `prints_bits`.
    """

    backend: str
    module: str
    parameters: tuple[str, ...]
    imports: tuple[str, ...]
    functions: Mapping[str, str]
    cast: str
    number: str
    copy: str
    writes: bool = True
    others: Mapping[Op, str] = field(default_factory=dict)
    lacks: Collection[Op] = ()
    prints_bits: bool = False


#: Operators with the same meaning in every array library.
_OPERATORS: OpTable = {
    Op.ADD: "({} + {})", Op.SUB: "({} - {})", Op.MUL: "({} * {})", Op.DIV: "({} / {})", Op.NEG: "(-{})",
    Op.LT: "({} < {})", Op.LE: "({} <= {})", Op.GT: "({} > {})", Op.GE: "({} >= {})", Op.EQ: "({} == {})",
    Op.NE: "({} != {})", Op.AND: "({} & {})", Op.OR: "({} | {})", Op.NOT: "(~{})",
}  # fmt: skip

#: Functions with the same name in every array library.
_FUNCTIONS: Mapping[Op, str] = {
    **{op: name for op, name in having("array").items() if op not in _OPERATORS},
    Op.WHERE: "where",
    Op.SIGN: "sign",
}

#: Functions that array libraries lack, spell differently or compute badly.
_OTHERS: Mapping[Op, str] = {Op.CBRT: "cbrt", Op.ERF: "erf", Op.POW: "power", Op.SIGMOID: "sigmoid"}

#: Functions of the bits of numbers; they take the library first.
_BITS: Mapping[Op, str] = {Op.AWAY: "away", Op.ULPS: "ulps", Op.COARSE: "coarse", Op.CHANCE: "chance"}


#: The lines of import of the functions of bits, for `Dialect.functions`.
BITS_IMPORTS = {name: f"from rulec.array_api.bits import {name}" for name in _BITS.values()}


def operations(dialect: Dialect, compute: str) -> OpTable:
    """The table of a dialect for code in the dtype `compute`."""

    def call(function: str, *first: str) -> Callable[..., str]:
        def text(*operands: str) -> str:
            # A call with bare numbers alone would have the library's own dtype.
            typed = [*first, *(dialect.number.format(x, compute) if is_number(x) else x for x in operands)]
            return f"{function}({', '.join(typed)})"

        return text

    functions = {op: call(f"{dialect.module}.{name}") for op, name in _FUNCTIONS.items()}
    others = {op: call(name) for op, name in {**_OTHERS, **dialect.others}.items()}
    library = () if dialect.prints_bits else (dialect.module,)
    others |= {op: call(name, *library) for op, name in _BITS.items()}
    composed = {Op.FLOORDIV: f"{dialect.module}.floor({{}} / {{}})", Op.RSQRT: f"(1.0 / {dialect.module}.sqrt({{}}))"}
    table = {**_OPERATORS, **functions, **others, **composed}
    return {op: text for op, text in table.items() if op not in dialect.lacks}


class StageFunction:
    """One stage of a program as a function of one tensor's arrays and scalars."""

    #: The printer of its values.
    printer_kind: type[StagePrinter] = StagePrinter

    def __init__(
        self, dialect: Dialect, program: Program, layout: Layout, index: int = 0, copied: Sequence[str] = ()
    ) -> None:
        """Buffers in `copied` are read from a copy: a stage that writes in place could overwrite them too early."""
        self.dialect, self.program, self.layout, self.copied = dialect, program, layout, copied
        self.stage = program.stages[index]
        self.name = "step" if len(program.stages) == 1 else f"stage_{index}"
        taken = {dialect.module, *dialect.parameters, self.name, "real", "inf", "nan", *dialect.functions}
        values = buffer_names(program, taken)
        taken |= set(values.values())
        self.values = values | {name: unique_name(name, taken) for name in self.stage.reads}
        self.printer = self.printer_kind(
            dialect.backend, program, self.stage, operations(dialect, layout.compute), repr,
            self.values.__getitem__, frozenset(taken), self.values.__getitem__,
        )  # fmt: skip
        stored = [s.buffer for s in self.stage.stores]
        used = {*(stored if dialect.writes else ()), *self.printer.loads()}
        #: The buffers and vectors among the parameters, in order.
        self.buffers = [b.name for b in program.buffers if b.name in used]
        self.vectors = list(self.stage.reads)
        taken |= {*self.printer.names.values(), *map(self.printer.column, range(len(program.columns)))}
        #: The name of each array: the name of its value where the two are the same.
        self.arrays = {
            b: unique_name(f"{b}_stored", taken) if self._is_converted(b) else self.values[b]
            for b in [*self.buffers, *self.vectors]
        }
        self.results = {b: unique_name(f"{b}_new", taken) for b in stored}
        self.reductions = {r.name: unique_name(r.name, taken) for r in self.stage.reduces}

    @property
    def sees_matrices(self) -> bool:
        """Whether the stage sees rows and columns of matrices; else arrays keep their own shapes."""
        read = [self.program.result(name).axes for name in self.vectors]
        axes = [*read, *(r.axes for r in self.stage.reduces)]
        return any(not a.number and not a.elementwise for a in axes)

    def _is_converted(self, name: str) -> bool:
        if name in self.vectors:
            return is_boolean(self.program.result(name).value)
        other_dtype = self.layout.dtype(name) != self.layout.compute
        return other_dtype or name in self.copied or (self.layout.maximize and name == "g")

    def _load(self, name: str) -> str:
        """The value of a buffer before the stage, or of a vector, as an expression of its array."""
        text = self.arrays[name]
        if name in self.vectors:
            return f"{text} != 0"
        if self.layout.dtype(name) != self.layout.compute:
            text = self.dialect.cast.format(text, self.layout.compute)
        elif name in self.copied:
            text = self.dialect.copy.format(text)
        return f"-{text}" if self.layout.maximize and name == "g" else text

    def columns(self) -> list[int]:
        """The columns of the scalar table among the parameters, in order."""
        return self.printer.columns_used()

    def source(self, summary: str, ending: Callable[[Mapping[str, str]], Sequence[str]]) -> str:
        """The function, with the docstring `summary`. `ending` maps the text of each stored value to the last lines."""
        scalars = {self.printer.column(i): self.program.columns[i].value for i in self.columns()}
        parameters = [*self.dialect.parameters, *self.arrays.values(), *scalars]
        loads = [*self.printer.loads(), *self.vectors]
        body = [f"{self.values[b]} = {self._load(b)}" for b in loads if self._is_converted(b)]
        body += [f"{name} = {name} != 0" for name, value in scalars.items() if is_boolean(value)]
        body += [f"{name} = {bare(text)}" for name, text in self.printer.lines()]
        written = {}
        # Every value comes before the first write, as a write may change the operand of another value.
        for buffer, value in ((s.buffer, s.value) for s in self.stage.stores):
            text = bare(self.printer.text(value))
            if value not in self.printer.names and value.op.kind is not Kind.LEAF:
                body.append(f"{self.results[buffer]} = {text}")
                text = self.results[buffer]
            written[buffer] = text
        head = _signature(self.name, parameters)
        return "\n".join([head, f'    """{summary}"""', *(f"    {x}" for x in [*body, *ending(written)])])


def print_file(dialect: Dialect, program: Program, layout: Layout, functions: Sequence[str]) -> str:
    """The whole file of a program's printed functions."""
    title = f"{program.name} by the {dialect.backend} backend: {layout.text()}. Printed by rulec."
    words = set(re.findall(r"\w+", "\n".join(functions)))
    floats = [name for name in ("inf", "nan") if name in words]
    imports = [f"from math import {', '.join(floats)}"] if floats else []
    imports += [*dialect.imports, *(line for name, line in dialect.functions.items() if name in words)]
    head = [f'"""{title}"""', *(["", *imports] if imports else [])]
    return "\n".join([*head, *(line for text in functions for line in ("", "", text)), ""])


def _signature(name: str, parameters: Sequence[str]) -> str:
    """`def name(...)`, on as many lines as it needs."""
    line = f"def {name}({', '.join(parameters)}):"
    if len(line) <= 120:
        return line
    wrapped = textwrap.wrap(", ".join(parameters), 112, break_long_words=False, break_on_hyphens=False)
    return "\n".join([f"def {name}(", *(f"    {x}" for x in wrapped[:-1]), f"    {wrapped[-1]},", "):"])
