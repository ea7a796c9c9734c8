"""Kernels of bfloat16 that take two neighbouring elements at once, as one word of 32 bits.

The lower half of a word becomes a float by a shift, the upper half by a mask, and two floats are joined into a word as
easily. A bfloat16 by itself is first moved to a lane twice as wide, and back: half of such a kernel's instructions.
"""

from __future__ import annotations

from rulec.language.expr.node import Op, walk

from .inlined import arguments, call
from .source import indented, loop
from .stage import StageWriter

#: The names of this text that no value of a rule gets.
PAIR_LOCALS = frozenset({"lower", "upper", "last", "update"})

_STORAGE = "bfloat16"


def in_pairs(write: StageWriter) -> bool:
    """Whether a stage of elements has all of them in bfloat16, and none of its values depends on an element's place."""
    buffers = write.nest.buffers
    plain = all(write.layout.dtype(b) == _STORAGE and not write.layout.format(b) for b in buffers)
    return plain and not any(n.op is Op.CHANCE for n in walk(write.stage.roots))


def pair_lines(write: StageWriter) -> list[str]:
    """The loop over the pairs of elements `start` to `stop`, and the last element of an odd number."""
    two = [
        f"store_two_{_STORAGE}({write.element(s.buffer)}, lower[{number}], upper[{number}])"
        for number, s in enumerate(write.stage.stores)
    ]
    one = [
        f"store_{_STORAGE}({write.element(s.buffer)}, last[{number}])" for number, s in enumerate(write.stage.stores)
    ]
    return [
        *(f"{write.at[b]} = {write.address(b)} + 2 * start" for b in write.lines if b in write.nest.buffers),
        *write.scalar_lines(),
        *loop("i", "0", "(stop - start) // 2", [*_updated(write, "lower"), *_updated(write, "upper"), *two]),
        "if (stop - start) % 2:",
        *indented(["i = stop - start - 1", *_updated(write, "last"), *one]),
    ]  # fmt: skip


def _updated(write: StageWriter, which: str) -> list[str]:
    """The new values of an element: of the lower or the upper half of a word, or of the last element."""
    word = f"{'load' if which == 'last' else which}_{_STORAGE}"
    loads = [f"{write.names[b]} = {write.load(b, word)}" for b in write.printer.loads()]
    return [*loads, *call(f"{which} = update", arguments(write))]
