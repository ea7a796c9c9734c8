"""Partial sums of a stage: sums that statistics alone read, over blocks of elements, in float32.

A sum in float64 takes two vectors for one of float32, and a conversion for each. A block is added up in float32 with
some dozens of elements in a lane, and the blocks in float64. One addition errs by half an ulp of the sum so far: see
docs/watch.md. Elements that fulfil a condition are counted in whole numbers. A block whose sum is beyond float32 is
added up again in float64 where the stage still has its operands: squares of gradients near 1e18 do not end in infinity.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from rulec.backend.printer import StagePrinter, bare
from rulec.compiler.ir import Program, Result, Stage
from rulec.compiler.layout import Layout
from rulec.language.expr.node import Kind, Node, Op, node, walk

from ..common.partial import counted, partial_sums
from .source import indented, loop

#: The elements of a block at most.
BLOCK = 512


def in_blocks(program: Program, layout: Layout, stage: Stage) -> list[Result]:
    """The sums of a stage that can have partial sums: all of them, where statistics alone read them.

    In other stages, blocks would change the order of a sum of the rule, and so its last bits.
    """
    sums = [r for r in stage.reduces if r.value.op is Op.SUM]
    partial = partial_sums(program, layout, stage)
    return partial if len(partial) == len(sums) else []


class PartialSums:
    """The text of the partial sums of a stage.

    `variables` has the names of partial sums, and `names` of whole sums, by reduction. `load` gives the old element
    of a buffer. A buffer in `kept` is the same after the loop over a block.
    """

    def __init__(
        self, sums: Sequence[Result], variables: Mapping[str, str], names: Mapping[str, str], printer: StagePrinter,
        load: Callable[[str], str], kept: Collection[str],
    ) -> None:  # fmt: skip
        self.variables, self.names, self.printer, self.load, self.kept = variables, names, printer, load, kept
        self._sums = {r.name: r for r in sums}
        #: The count of elements that are not finite -> the sum of their squares, which then is not finite either.
        self._seldom = {name: squares for name in self._sums if (squares := self._squares_beside(name))}

    def loop(self, start: str, stop: str, body: Sequence[str]) -> list[str]:
        """The loop over elements, or over blocks of them where there are partial sums."""
        if not self.variables:
            return loop("i", start, stop, body)
        names, stop_of_block = self.names, f"min(block + {BLOCK}, {stop})"
        begun = [f"{each} = {'int32(0)' if self._counts(name) else 'float32(0.0)'}" for name, each in self._items()]
        ended = [f"{names[name]} = {names[name]} + {each}" for name, each in self._items()]
        return loop("block", start, f"{stop}, {BLOCK}", [
            *begun, *loop("i", "block", stop_of_block, body),
            *(line for name in self._sums for line in self._again(name, stop_of_block)), *ended,
        ])  # fmt: skip

    def lines(self, reduction: Result) -> list[str]:
        """The statement that takes in one element, in the loop over all of them."""
        return [] if reduction.name in self._seldom else [self._taken_in(reduction)]

    def _items(self) -> list[tuple[str, str]]:
        return [*self.variables.items()]

    def _taken_in(self, reduction: Result) -> str:
        variable, printer = self.variables[reduction.name], self.printer
        (operand,) = reduction.value.args
        count = counted(operand)
        if count is not None:
            condition, holds = count
            text = printer.text(condition)
            return f"{variable} = counted({variable}, {bare(text) if holds else f'not {text}'})"
        if operand.op is Op.MUL and operand not in printer.names:
            factors = ", ".join(bare(printer.text(a)) for a in operand.args)
            return f"{variable} = accumulate_product({variable}, {factors})"
        return f"{variable} = accumulate({variable}, {bare(printer.text(operand))})"

    def _counts(self, name: str) -> bool:
        return counted(self._sums[name].value.args[0]) is not None

    def _squares_beside(self, name: str) -> str:
        """The sum of squares of what a reduction counts as not finite; empty where there is none to rely on."""
        count = counted(self._sums[name].value.args[0])
        if count is None or count[1] or count[0].op is not Op.ISFINITE:
            return ""
        (x,) = count[0].args
        square = node(Op.MUL, x, x)
        if x.op is not Op.LOAD or not self._is_repeatable(square):
            return ""
        return next((r.name for r in self._sums.values() if r.value.args[0] is square), "")

    def _is_repeatable(self, operand: Node) -> bool:
        """Whether an operand can be computed again after the stores of the stage: it reads arrays that stay."""
        leaves = [n for n in walk([operand]) if n.op.kind is Kind.LEAF]
        inner = [n for n in walk(operand.args) if n.op.kind is not Kind.LEAF]
        return (
            all(n.op in (Op.CONST, Op.SCALAR) or (n.op is Op.LOAD and n.arg in self.kept) for n in leaves)
            and not any(n in self.printer.names or n.op.kind is Kind.RANDOM for n in inner)
        )  # fmt: skip

    def _again(self, name: str, stop: str) -> list[str]:
        """The loop over a block whose sum is infinite or NaN: it adds up in float64, and has the counts beside it."""
        operand, whole, part = self._sums[name].value.args[0], self.names[name], self.variables[name]
        if self._counts(name) or not self._is_repeatable(operand):
            return []
        buffers = dict.fromkeys(str(x.arg) for x in walk([operand]) if x.op is Op.LOAD)
        counts = [self._taken_in(self._sums[count]) for count, squares in self._seldom.items() if squares == name]
        text = bare(self.printer.text(operand, defining=True))
        body = loop("i", "block", stop, [
            *(f"{self.names[b]} = {self.load(b)}" for b in buffers), *counts, f"{whole} = accumulate({whole}, {text})",
        ])  # fmt: skip
        return [f"if not isfinite({part}):", *indented([f"{part} = float32(0.0)", *body])]
