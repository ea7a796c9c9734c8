"""The levels of reductions and states: words, and the levels `axis(i)` and `block(n)` with a number of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rulec.language.expr.node import LEVELS, PLACED, Node, Op, node
from rulec.language.expr.text import expression_text

#: A call of each level with a number, as messages show it.
SIGNATURES: Mapping[str, str] = {"axis": "axis(0)", "block": "block(64)"}


@dataclass(frozen=True)
class Level:
    """`axis(number)` or `block(number)`: the level of one value for each index of an axis, or for each block.

    `trace` is as in `rulec.language.tracing.value.Value`.
    """

    word: str
    number: Node
    trace: Any = field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        return level_text(self.word, self.number)


def level_text(word: str, number: Node | None) -> str:
    """A level as it is written in a rule: `row`, or `axis(0)`."""
    return word if number is None else f"{word}({expression_text(number)})"


def reduction(op: Op, x: Node, per: str | Level) -> Node:
    """The reduction of `x` to a level."""
    return node(op, x, per.number, per.word) if isinstance(per, Level) else node(op, x, per)


def bare_problem(word: str) -> str:
    """Why a level cannot stand without its number, as a sentence; empty where it can."""
    return f"{word} is a level with a number: write {SIGNATURES[word]}" if word in PLACED else ""


def levels_text() -> str:
    """All levels, as messages list them."""
    return ", ".join([*LEVELS, *SIGNATURES.values()])
