"""Indices of elements as arrays: the template of an index, computed by the arithmetic of a library.

A template is an expression of names. `i` and `j` are the row and the column of an element in a matrix, `b` the number
of the matrix in its batch; `0`, `1` and so on are numbers known in a step, `s0`, `s1` and so on numbers of a shape.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from rulec.language.expr.node import Node, Op, walk
from rulec.language.expr.static import letters_of

_SHAPES = {"b": (-1, 1, 1), "i": (1, -1, 1), "j": (1, 1, -1)}


def index_array(
    template: Node, operands: Sequence[Any], arithmetic: Mapping[Op, Callable[..., Any]],
    constant: Callable[[float], Any], counted: Callable[[str, int], Any],
) -> Any:  # fmt: skip
    """An index as an array `(batch, rows, cols)`, with 1 for an axis without its letter.

    `operands` are the numbers of a step, the extents of the letters, and the numbers of a shape. `counted` gives the
    numbers of a letter, of so many in all, and `constant` a number; the result has their dtype, which is float64.
    """
    letters, names = letters_of(template), {str(n.arg) for n in walk([template]) if n.op is Op.NAME}
    step = sum(key.isdigit() for key in names)
    extents, shaped = operands[step : step + len(letters)], operands[step + len(letters) :]
    leaves = {c: counted(c, int(n)).reshape(_SHAPES[c]) for c, n in zip(letters, extents, strict=True)}
    leaves |= {str(k): x for k, x in enumerate(operands[:step])}
    leaves |= {f"s{k}": constant(float(x)) for k, x in enumerate(shaped)}
    values: dict[Node, Any] = {}
    for part in walk([template]):
        if part.op is Op.CONST:
            values[part] = constant(cast(float, part.arg))
        elif part.op is Op.NAME:
            values[part] = leaves[str(part.arg)]
        else:
            values[part] = arithmetic[part.op](*(values[a] for a in part.args))
    return values[template]
