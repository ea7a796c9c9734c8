"""The values outside of a stage's loops in C: loops over rows, columns and matrices, one after the other."""

from __future__ import annotations

from rulec.language.expr.node import Op

from ...cstyle.element import NOTHING, taken_in
from ...cstyle.numbers import Numbers
from .stage import RESERVED, loop


class CNumbers(Numbers):
    """The values of one function of C."""

    backend = "c"

    @property
    def reserved_count(self) -> int:
        """The number of words that no value may be called."""
        return len(RESERVED)

    def loop(self, variable: str, size: str, body: list[str], kept: bool) -> list[str]:
        """A loop of C over whole numbers."""
        return loop(variable, "0", size, body)

    def reduced(self, op: Op, name: str, variable: str, size: str, text: str) -> list[str]:
        """A loop of C declares and reduces the number."""
        return [f"double {name} = {NOTHING[op]};", *loop(variable, "0", size, [taken_in(op, name, text)])]

    def reduced_sides(self, op: Op, name: str, array: str, side: str, text: str) -> list[str]:
        """A loop of C reduces the side of each matrix."""
        inner = loop("k", "0", side, [taken_in(op, name, text)])
        return loop("matrix", "0", "batch", [f"double {name} = {NOTHING[op]};", *inner, f"{array}[matrix] = {name};"])
