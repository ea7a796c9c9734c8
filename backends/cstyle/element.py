"""Prints one stage of one element as a C-style function, the same text for C99 and CUDA C.

The function takes addresses and an index, so the same text runs over memory and over a few elements in registers.
Columns of the scalar table, and values of rows, columns and matrices, are numbers among its parameters. The caller has
float64 totals for the reductions, one for each lane, thread or column; or some in float32 for few elements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from rulec.backend.printer import StagePrinter, unique_name
from rulec.compiler.ir import Program, Result, Stage
from rulec.compiler.layout import Layout
from rulec.errors import BackendUnsupported
from rulec.kernel.nest import Nest
from rulec.kernel.place import COL, ELEMENT, address_lines
from rulec.language.expr.node import Kind, Node, Op, is_boolean, walk
from rulec.language.expr.ops import FUNCTIONS as ELEMENTWISE

from ..common.text import chance_call, line_comment
from .dialect import WIDTH, Dialect, call_lines, indented
from .words import LIBRARY, RESERVED, WORDS

#: The C type of a stored element; elements of 16 bits move as integers.
STORAGE: Mapping[str, str] = {
    "float32": "float", "float64": "double", "bfloat16": "uint16_t", "float16": "uint16_t",
    "int16": "int16_t", "int8": "int8_t",
}  # fmt: skip


class Infix(NamedTuple):
    """An operator between two operands, and its precedence."""

    symbol: str
    level: int


_ATOM, _UNARY, _PRODUCT, _SUM, _ORDER, _EQUALITY, _AND, _OR, _CHOICE = range(9, 0, -1)

#: The spelling of each operation: an operator, or a function's name, with an `f` behind it for float. The others are in
#: `ElementPrinter._special`.
SPELLINGS: Mapping[Op, Infix | str] = {
    Op.ADD: Infix("+", _SUM), Op.SUB: Infix("-", _SUM), Op.MUL: Infix("*", _PRODUCT), Op.DIV: Infix("/", _PRODUCT),
    Op.LT: Infix("<", _ORDER), Op.LE: Infix("<=", _ORDER), Op.GT: Infix(">", _ORDER), Op.GE: Infix(">=", _ORDER),
    Op.EQ: Infix("==", _EQUALITY), Op.NE: Infix("!=", _EQUALITY), Op.AND: Infix("&&", _AND), Op.OR: Infix("||", _OR),
    Op.POW: "pow", Op.MOD: "modulo", Op.ABS: "fabs", Op.AWAY: "away", Op.ULPS: "ulps", Op.COARSE: "coarse",
    # The functions that C or these words have under their own names.
    **{op: op.symbol for op in ELEMENTWISE if op.symbol in (*LIBRARY, *WORDS)},
}  # fmt: skip

#: The reduction of no elements.
NOTHING: Mapping[Op, str] = {Op.SUM: "0.0", Op.MIN: "INFINITY", Op.MAX: "-INFINITY"}

#: Constant exponents that are faster, and as accurate, in another way; small whole ones are products already.
_POWERS = {-1.0: "{one} / {x}", -2.0: "inverse_square{f}({x})", 0.5: "root{f}({x})", -0.5: "{one} / root{f}({x})"}

_LOCALS = frozenset({"i", "element", "unscale"})

#: The parameters of a function with random bits: the place of its element in its tensor, and a place less than 2**32
#: before it that is the same for all elements of a loop.
PLACE = ("position", "origin")

#: A text, and the precedence of its outermost operator.
_Piece = tuple[str, int]


@dataclass(frozen=True)
class Parameter:
    """A parameter of an element's function.

    `kind` is "index", "position", "buffer", "vector", "scalar", "inverse", "scale" or "total". `of` names its buffer,
    vector, column of the scalar table, divisor or reduction. `place` is for a vector: with a value for each element the
    parameter is an address; with one for each row, column or matrix, as they lie in memory, it is a number.
    """

    kind: str
    type: str
    name: str
    of: str = ""
    place: str = ""

    @property
    def declaration(self) -> str:
        """The declaration of the parameter."""
        return f"{self.type}{'' if self.type.endswith('*') else ' '}{self.name}"


class ElementWriter:
    """The function of one stage's element: its parameters, its text, and calls of it.

    `names` are the variables of buffers' old values, vectors and totals; `at` the variables of their addresses. None of
    them is the name of a function, a type, or a reserved word. With `scaled`, gradients are multiplied by `unscale`.
    The totals of the reductions `narrow` are in float32.
    """

    def __init__(
        self, program: Program, layout: Layout, stage: Stage, dialect: Dialect, name: str = "element",
        scaled: bool = False, narrow: Collection[str] = (),
    ) -> None:  # fmt: skip
        self.program, self.layout, self.stage, self.dialect, self.name = program, layout, stage, dialect, name
        self.nest, self.scaled, self.narrow = Nest(program, layout, stage), scaled, narrow
        #: The type of arithmetic, and the suffix of its functions and numbers.
        self.real, self.suffix = ("double", "") if layout.compute == "float64" else ("float", "f")
        #: Whether the function takes the place of its element in its tensor, for random bits.
        self.placed = any(n.op is Op.CHANCE for n in walk(stage.roots))
        taken = set(RESERVED | _LOCALS | dialect.reserved | {name} | ({*PLACE} if self.placed else set()))
        lines = address_lines(program)
        self.names = {line: unique_name(line, taken) for line in lines}
        self.at = {line: unique_name(f"{self.names[line]}_at", taken) for line in lines}
        #: The names that no other variable may have.
        self.taken = taken
        self.printer = ElementPrinter(
            dialect.backend, program, stage, {}, self.constant, self.names.__getitem__, frozenset(taken),
            self.names.__getitem__, quotient=f"quotient{self.suffix}({{}}, {{}}, {{}})" if dialect.branches else "",
        )  # fmt: skip

    # Parameters

    def parameters(self) -> list[Parameter]:
        """Its parameters, in order."""
        parameters = [Parameter("index", "int64_t", "i")]
        parameters += [Parameter("position", "int64_t", name) for name in PLACE] * self.placed
        parameters += [self._buffer(b) for b in self.nest.buffers]
        parameters += [self._vector(v) for v in self.nest.vectors]
        parameters += [self._scalar(i) for i in self.printer.columns_used()]
        parameters += [Parameter("inverse", self.real, name, of) for of, name in self.printer.inverses().items()]
        parameters += [Parameter("scale", self.real, "unscale")] * (self.scaled and "g" in self.printer.loads())
        return parameters + [
            Parameter("total", self.total_pointer(r), self.names[r.name], r.name) for r in self.stage.reduces
        ]

    def pointer(self, buffer: str) -> str:
        """The type of the address of a buffer."""
        const = "" if buffer in self.nest.stored else "const "
        return f"{self.dialect.memory}{const}{STORAGE[self.layout.dtype(buffer)]} *"

    def total_pointer(self, reduction: Result) -> str:
        """The type of the address of a total: a slot in memory for a column, else a variable."""
        if reduction.name in self.narrow:
            return "float *"
        return f"{self.dialect.memory if self.nest.place(reduction) == COL else ''}double *"

    def _buffer(self, buffer: str) -> Parameter:
        return Parameter("buffer", self.pointer(buffer), self.at[buffer], buffer)

    def _vector(self, vector: Result) -> Parameter:
        where = self.nest.place(vector)
        if where == ELEMENT:
            return Parameter(
                "vector", f"{self.dialect.memory}const {self.real} *", self.at[vector.name], vector.name, where
            )
        return Parameter("vector", self._type(vector.value), self.names[vector.name], vector.name, where)

    def _scalar(self, column: int) -> Parameter:
        kind = self._type(self.program.columns[column].value)
        return Parameter("scalar", kind, self.printer.column(column), str(column))

    def _type(self, value: Node) -> str:
        return "bool" if is_boolean(value) else self.real

    def constant(self, value: float) -> str:
        """A number of the type of arithmetic."""
        return literal(value, self.suffix)

    # Its text

    def text(self) -> str:
        """The function."""
        head = call_lines(
            f"{self.dialect.function} void {self.name}", _grouped(self.parameters(), lambda p: p.declaration), ""
        )
        return "\n".join([*head, "{", *indented(self.body()), "}", ""])

    def body(self) -> list[str]:
        """Loads, values, stores and totals. Every value is computed before the first store."""
        return [*self._loads(), *self._values(), *self._stores(), *self._totals()]

    def _loads(self) -> list[str]:
        lines = [self._defined(self.real, self.names[b], self._load(b)) for b in self.printer.loads()]
        for vector in self.nest.read(ELEMENT):
            text = f"{self.at[vector.name]}[i]{' != 0' * is_boolean(vector.value)}"
            lines.append(self._defined(self._type(vector.value), self.names[vector.name], text))
        return lines

    def _load(self, buffer: str) -> str:
        storage = self.layout.dtype(buffer)
        text = f"{self.at[buffer]}[i]"
        if storage in ("bfloat16", "float16"):
            text = f"from_{storage}({text})"
        if buffer != "g":
            return text
        return f"{'-' * self.layout.maximize}{text}{' * unscale' * self.scaled}"

    def _values(self) -> list[str]:
        values = {name: value for value, name in self.printer.names.items()}
        lines: list[str] = []
        for name, text in self.printer.lines():
            line = self._defined(self._type(values[name]), name, text)
            comment = line_comment(self.program, self.printer.names, values[name], text)
            if comment and len(line) + len(comment) + 9 > WIDTH:
                lines.append(f"// {comment}")
            elif comment:
                line += f"  // {comment}"
            lines.append(line)
        return lines

    def _stores(self) -> list[str]:
        return [f"{self.at[s.buffer]}[i] = {self._narrow(s.buffer, s.value)};"
                for s in self.stage.stores]  # fmt: skip

    def _narrow(self, buffer: str, value: Node) -> str:
        """A value converted to the stored dtype of its buffer."""
        storage, text = self.layout.dtype(buffer), self.printer.text(value)
        if storage == "bfloat16" and value.op is Op.COARSE:
            return f"upper_half({text})"
        if storage in ("bfloat16", "float16"):
            return f"to_{storage}({text if self.suffix else f'to_odd({text})'})"
        if storage == self.layout.compute:
            return text
        if storage in ("int16", "int8"):
            return f"({STORAGE[storage]})({text})"
        return f"(float)({text})" if " " in text or text.startswith("-") else f"(float){text}"

    def _totals(self) -> list[str]:
        return [self._taken_in(r) for r in self.stage.reduces]

    def _taken_in(self, reduction: Result) -> str:
        """The statement that joins the element to a total; to one in float32 without rounding its product."""
        total, (operand,) = self._total(reduction), reduction.value.args
        if reduction.name in self.narrow and operand.op is Op.MUL and operand not in self.printer.names:
            return f"{total} = fmaf({', '.join(map(self.printer.text, operand.args))}, {total});"
        return taken_in(reduction.value.op, total, self.printer.text(operand))

    def _total(self, reduction: Result) -> str:
        """The variable for the total of a reduction."""
        return f"*{self.names[reduction.name]}"

    @staticmethod
    def _defined(kind: str, name: str, text: str) -> str:
        return f"const {kind} {name} = {text};"

    # Calls of it

    def call(self, arguments: Mapping[str, str] = {}) -> list[str]:
        """The statement that calls it. `arguments` has texts for some parameters; the others get their own names."""
        return call_lines(self.name, _grouped(self.parameters(), lambda p: arguments.get(p.name, p.name)), ";")


class ElementPrinter(StagePrinter):
    """The shared printer, with C's operators and no more parentheses than they need."""

    def text(self, value: Node, defining: bool = False) -> str:
        return self._piece(value, defining)[0]

    def _piece(self, value: Node, defining: bool = False) -> _Piece:
        text = self.there(value, defining)
        if text is not None:
            return text, _UNARY if text.startswith(("-", "(")) else _ATOM
        inverse = self.inverse(value.args[1]) if value.op is Op.DIV else None
        if inverse is not None:
            return self.quotient.format(*map(self.text, value.args), inverse), _ATOM
        special = self._special(value)
        if special is not None:
            return special
        spelling = SPELLINGS.get(value.op)
        if spelling is None:
            raise BackendUnsupported(self.backend, f"{value.op.symbol!r}", self.program.name)
        if isinstance(spelling, Infix):
            return self._infix(spelling, *value.args), spelling.level
        suffix = "" if value.op.kind is Kind.BITS else self._suffix
        return f"{spelling}{suffix}({', '.join(map(self.text, value.args))})", _ATOM

    @property
    def _suffix(self) -> str:
        return "f" if self.constant(1.0).endswith("f") else ""

    def _special(self, value: Node) -> _Piece | None:
        """Operations other than operators between two operands and plain function calls."""
        one, suffix = self.constant(1.0), self._suffix
        if value.op in (Op.NEG, Op.NOT):
            sign = "-" if value.op is Op.NEG else "!"
            return sign + self._inside(value.args[0], _UNARY), _UNARY
        if value.op is Op.WHERE:
            condition, chosen, other = (self._inside(part, _CHOICE) for part in value.args)
            return f"{condition} ? {chosen} : {other}", _CHOICE
        if value.op is Op.WIDEN:  # the loop around it has the axes
            return self._piece(value.args[0])
        if value.op is Op.RSQRT:
            return f"{one} / sqrt{suffix}({self.text(value.args[0])})", _PRODUCT
        if value.op is Op.FLOORDIV:
            return f"floor{suffix}({self._infix(Infix('/', _PRODUCT), *value.args)})", _ATOM
        if value.op is Op.CHANCE:
            return chance_call(PLACE, [self.text(word) for word in value.args[1:]]), _ATOM
        if value.op is Op.ISFINITE:
            return f"isfinite({self.text(value.args[0])})", _ATOM
        if value.op is Op.POW and value.args[1].op is Op.CONST:
            return self._constant_power(value)
        return None

    def _constant_power(self, value: Node) -> _Piece | None:
        form = _POWERS.get(float(value.args[1].arg))  # type: ignore[arg-type]
        if form is None:
            return None
        one, suffix, divides = self.constant(1.0), self._suffix, form.startswith("{one} / {x}")
        x = self._inside(value.args[0], _PRODUCT) if divides else self.text(value.args[0])
        return form.format(one=one, x=x, f=suffix), _PRODUCT if "/" in form else _ATOM

    def _infix(self, operator: Infix, left: Node, right: Node) -> str:
        pieces = self._piece(left), self._piece(right)
        first, second = (
            text if _stands(operator.level, level, is_right) else f"({text})"
            for is_right, (text, level) in enumerate(pieces)
        )
        return f"{first} {operator.symbol} {second}"

    def _inside(self, value: Node, level: int) -> str:
        """An operand of an operator of this precedence: in parentheses unless it binds tighter."""
        text, binds = self._piece(value)
        return text if binds > level else f"({text})"


def literal(value: float, suffix: str = "") -> str:
    """A number as a C literal: a float where `suffix` is f, else a double."""
    if math.isnan(value):
        return "NAN"
    with np.errstate(over="ignore"):
        number = np.float32(value) if suffix else np.float64(value)
    if np.isinf(number):
        return "INFINITY" if number > 0 else "-INFINITY"
    return f"{number!s}{suffix}"


def taken_in(op: Op, total: str, text: str) -> str:
    """The statement that joins one more number to a total."""
    if op is Op.SUM:
        return f"{total} += {text};"
    return f"{total} = {'minimum' if op is Op.MIN else 'maximum'}({total}, {text});"


def _stands(operator: int, operand: int, is_right: int) -> bool:
    """Whether an operand of this precedence needs no parentheses beside an operator.

    Comparisons in a row, and && beside ||, have them only because compilers warn.
    """
    if operand == operator:
        return not is_right and operator not in (_ORDER, _EQUALITY)
    return operand > operator and (operator, operand) not in ((_OR, _AND), (_EQUALITY, _ORDER))


#: The group of a parameter where it is not named as its kind.
_GROUPS = {"index": "buffer", "position": "buffer", "vector": "buffer", "inverse": "scalar", "scale": "scalar"}


def _grouped(parameters: Sequence[Parameter], text: Callable[[Parameter], str]) -> list[list[str]]:
    """The texts of parameters in groups, each on a line of a long list: addresses, numbers, totals."""
    groups: dict[str, list[str]] = {}
    for parameter in parameters:
        groups.setdefault(_GROUPS.get(parameter.kind, parameter.kind), []).append(text(parameter))
    return list(groups.values())
