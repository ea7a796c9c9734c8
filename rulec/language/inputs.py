"""The kinds of the inputs of a step: a number, an array of the parameter's shape, or a matrix with extents of its own.

A matrix is like a state with this `shape`, which a step reads and never writes: its user gives it at every step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rulec.language.expr.node import Node, Op, name
from rulec.language.expr.text import expression_text
from rulec.language.source import Span


@dataclass(frozen=True)
class Matrix:
    """A matrix for each parameter, with extents of its own: its rows and columns as expressions, and its place."""

    extents: tuple[Node, ...]
    span: Span | None = field(default=None, compare=False, repr=False)


#: `scalar`, `like p`, or a matrix.
InputKind = str | Matrix

SCALAR, LIKE_P = "scalar", "like p"

#: The kinds that are words.
WORDS = (SCALAR, LIKE_P)


def kind_of(extents: tuple[Node, ...], span: Span | None = None) -> InputKind:
    """The kind of an input with the extents; `like p` where they are the parameter's own."""
    return LIKE_P if extents == (name("rows"), name("cols")) else Matrix(extents, span)


def matrices_of(inputs: Mapping[str, InputKind]) -> dict[str, Matrix]:
    """The inputs that are matrices with extents of their own."""
    return {key: kind for key, kind in inputs.items() if isinstance(kind, Matrix)}


def per_tensor(kind: InputKind) -> bool:
    """Whether an input has an array for each parameter."""
    return kind != SCALAR


def kind_data(kind: InputKind) -> Any:
    """A kind as it stands in a rule file."""
    return kind if isinstance(kind, str) else {"shape": [_plain(x) for x in kind.extents]}


def kind_text(kind: InputKind) -> str:
    """A kind in words, for messages."""
    return f"{kind!r}" if isinstance(kind, str) else f"of shape [{', '.join(map(expression_text, kind.extents))}]"


def changed_extents(inputs: Mapping[str, InputKind], change: Callable[[Node], Node]) -> dict[str, InputKind]:
    """The inputs with their extents changed."""
    changed = {
        key: replace(kind, extents=tuple(map(change, kind.extents))) for key, kind in matrices_of(inputs).items()
    }
    return {**inputs, **changed}


def _plain(extent: Node) -> float | str:
    return float(extent.arg) if extent.op is Op.CONST else expression_text(extent)  # type: ignore[arg-type]
