"""Prints the values outside of a stage's loops: numbers, and values of rows, columns and matrices, in double.

A subclass for each language prints the loops. Values go into segments: lines of numbers, loops over one kind of vector,
and reductions of vectors. A value joins the first segment of its kind after the segments of its operands.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rulec.backend.printer import unique_name
from rulec.compiler.axes import AxisInference
from rulec.compiler.ir import Program, Stage
from rulec.language.expr.node import Kind, Node, Op, is_boolean, walk

from .element import ElementPrinter, literal

#: The kinds of vectors by their letters: the loop variable, the number of values, and the suffix of their arrays.
LOOPS: Mapping[str, tuple[str, str, str]] = {
    "b": ("matrix", "batch", "matrices"),
    "bi": ("line", "batch * rows", "rows"),
    "bj": ("column", "batch * cols", "cols"),
}

#: Where the numbers in names begin, however many words are reserved: a new word changes no printed file.
_FIRST = 261


@dataclass
class _Segment:
    """Values printed together: lines of numbers where `letters` is empty, else a loop. A reduction is `alone`."""

    letters: str
    alone: bool
    members: list[Node] = field(default_factory=list)


class Numbers(ABC):
    """The values of one printed function.

    `leaf(value, index)` gives the text of a hyper-parameter, `t`, shape fact, state or reduction; `index` is the place
    in its vector, empty for a number. `roots` maps each value needed in the function to its preferred name. `work`
    collects the arrays of the function: name and size.
    """

    #: The backend of the language, for errors.
    backend: str

    def __init__(
        self, program: Program, roots: Mapping[Node, str], leaf: Callable[[Node, str], str], taken: set[str]
    ) -> None:
        self.program, self.roots, self.leaf, self.taken = program, roots, leaf, taken
        self.inference = AxisInference(program)
        self.named: dict[Node, str] = {}
        self.arrays: dict[Node, str] = {}
        self.work: list[tuple[str, str]] = []
        self.order = list(walk(roots))
        self._users: dict[Node, list[Node]] = {}
        for value in self.order:
            for operand in dict.fromkeys(value.args):
                self._users.setdefault(operand, []).append(value)

    @property
    @abstractmethod
    def reserved_count(self) -> int:
        """The number of reserved words among the names that are taken."""

    def letters(self, value: Node) -> str:
        """The letters of a vector, empty for a number."""
        return "".join(c for c in self.inference.axes(value).letters if c in "bij")

    # Values on their own lines

    def _is_named(self, value: Node) -> bool:
        """Whether a value has its own line: a root, a labelled value, a value of several users, or a reduction."""
        if value.op.kind is Kind.LEAF:
            return value in self.roots and value.op is not Op.CONST
        users = self._users.get(value, [])
        apart = any(self.letters(u) != self.letters(value) or u.op.kind is Kind.REDUCE for u in users)
        several = len(users) > 1 or any(u.args.count(value) > 1 for u in users)
        return value in self.roots or value in self.program.labels or several or apart or value.op.kind is Kind.REDUCE

    def lines(self, wanted: Iterable[Node]) -> list[str]:
        """The statements for some values, with their operands before them, unless computed earlier."""
        done = self.named.keys() | self.arrays.keys()
        members = [v for v in walk(wanted, done) if self._is_named(v)]
        segments: list[_Segment] = []
        place: dict[Node, int] = {}
        for value in members:
            self._place(value, segments, place)
        here = {v: place[v] for v in members}
        return [line for index, s in enumerate(segments) for line in self._segment(s, index, here)]

    def _place(self, value: Node, segments: list[_Segment], place: dict[Node, int]) -> None:
        reduces = value.op.kind is Kind.REDUCE and bool(self.letters(value.args[0]))
        letters = self.letters(value)
        first = 0
        for operand in self._needs(value):
            if operand in place:
                segment = segments[place[operand]]
                together = not reduces and not segment.alone and segment.letters == letters
                first = max(first, place[operand] + (not together))
        fitting = (i for i, s in enumerate(segments) if i >= first and s.letters == letters and not s.alone)
        index = len(segments) if reduces else next(fitting, len(segments))
        if index == len(segments):
            segments.append(_Segment(letters, reduces))
        segments[index].members.append(value)
        place[value] = index

    def _needs(self, value: Node) -> list[Node]:
        """The named operands of a value, and of the operands printed within its line."""
        needs: list[Node] = []
        stack = list(value.args)
        while stack:
            operand = stack.pop()
            if self._is_named(operand):
                needs.append(operand)
            else:
                stack.extend(operand.args)
        return needs

    # Segments

    def _segment(self, segment: _Segment, index: int, place: Mapping[Node, int]) -> list[str]:
        if segment.alone:
            return self._reduction(segment.members[0])
        if not segment.letters:
            return [self._number(v) for v in segment.members]
        variable, size, _ = LOOPS[segment.letters]
        body = [line for v in segment.members for line in self._in_loop(v, index, place)]
        for value in segment.members:
            self.named.pop(value, None)  # a local of the loop
        kept = any(value in self.arrays for value in segment.members)
        return self.loop(variable, size, indexed(body, segment.letters), kept)

    def _number(self, value: Node) -> str:
        text = self._text(value, "", defining=True)
        self.named[value] = unique_name(self._name(value), self.taken)
        return f"const {'bool' if is_boolean(value) else 'double'} {self.named[value]} = {text};"

    def _in_loop(self, value: Node, index: int, place: Mapping[Node, int]) -> list[str]:
        letters = self.letters(value)
        text = self._text(value, letters, defining=True)
        users = self._users.get(value, [])
        local = any(self._printed_in(u, index, place) for u in users)
        kept = value in self.roots or any(not self._printed_in(u, index, place) for u in users)
        lines = []
        name = self._name(value)
        if local:
            self.named[value] = unique_name(name, self.taken)
            lines = [f"const {'bool' if is_boolean(value) else 'double'} {self.named[value]} = {text};"]
            text = self.named[value]
        if kept:
            variable, size, kind = LOOPS[letters]
            self.arrays[value] = unique_name(f"{name}_{kind}", self.taken)
            self.work.append((self.arrays[value], size))
            lines.append(f"{self.arrays[value]}[{variable}] = {text};")
        return lines

    def _printed_in(self, value: Node, index: int, place: Mapping[Node, int]) -> bool:
        """Whether a value is printed in this segment, on its own line or within another."""
        if value in place:
            return place[value] == index
        users = self._users.get(value, [])
        return not self._is_named(value) and any(self._printed_in(u, index, place) for u in users)

    @abstractmethod
    def loop(self, variable: str, size: str, body: list[str], kept: bool) -> list[str]:
        """The lines of a loop from 0 to `size`; where something is `kept`, it fills arrays that later lines read."""

    @abstractmethod
    def reduced(self, op: Op, name: str, variable: str, size: str, text: str) -> list[str]:
        """The lines that declare the number `name`: a `text` for each `variable` from 0 to `size`, reduced."""

    @abstractmethod
    def reduced_sides(self, op: Op, name: str, array: str, side: str, text: str) -> list[str]:
        """The lines that reduce, for each `matrix`, a `text` for each `k` of a `side` into the array's element."""

    def _reduction(self, value: Node) -> list[str]:
        (operand,) = value.args
        have, keep = self.letters(operand), self.letters(value)
        name = unique_name(self._name(value), self.taken)
        if not keep:
            self.named[value] = name
            variable, size, _ = LOOPS[have]
            return self.reduced(value.op, name, variable, size, self._text(operand, have))
        side = {"bi": "rows", "bj": "cols"}[have]
        at = self._text(operand, have).replace(f"[{LOOPS[have][0]}]", f"[matrix * {side} + k]")
        self.arrays[value] = unique_name(f"{name}_matrices", self.taken)
        self.work.append((self.arrays[value], "batch"))
        return self.reduced_sides(value.op, name, self.arrays[value], side, at)

    # Text

    def _name(self, value: Node) -> str:
        number = _FIRST + len(self.taken) - self.reserved_count
        return self.roots.get(value) or self.program.labels.get(value) or f"{value.op.name.lower()}_{number}"

    def text(self, value: Node, letters: str = "") -> str:
        """A value as an expression, in a loop over vectors of these letters."""
        return self._text(value, letters)

    def _text(self, value: Node, letters: str, defining: bool = False) -> str:
        def known(part: Node) -> str | None:
            return None if defining and part is value and part.op.kind is not Kind.LEAF else self._known(part, letters)

        return ElementPrinter(self.backend, self.program, Stage(), {}, literal, known=known).text(value)

    def _known(self, value: Node, letters: str) -> str | None:
        """The text of a value computed before; None where its expression must be printed."""
        if value in self.named:
            return self.named[value]
        value_letters = self.letters(value)
        index = LOOPS[value_letters][0] if value_letters else ""
        if value in self.arrays:
            return f"{self.arrays[value]}[{index}]"
        if value.op.kind is Kind.LEAF:
            return self.leaf(value, index)
        # A reduction of a number: there is nothing to reduce.
        return self._text(value.args[0], letters) if value.op.kind is Kind.REDUCE else None


def indexed(body: Sequence[str], letters: str) -> list[str]:
    """The body of a loop over vectors of these letters, after the indices that it names."""
    variable, lines = LOOPS[letters][0], [*body]
    if used(body, "origin"):
        lines.insert(0, f"const int64_t position = {variable}, origin = {variable};")
    if letters != "b" and any("[matrix]" in line for line in body):
        lines.insert(0, f"const int64_t matrix = {variable} / {'rows' if letters == 'bi' else 'cols'};")
    return lines


def used(lines: Sequence[str], name: str) -> bool:
    """Whether any line names an identifier."""
    return any(re.search(rf"\b{re.escape(name)}\b", line) for line in lines)
