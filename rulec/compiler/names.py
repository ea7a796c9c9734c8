"""Names for what the compiler makes: the author's where there is one, else words for what it is."""

from __future__ import annotations

import re

from rulec.compiler.ir import Program
from rulec.language.node import Node, Op, const
from rulec.language.text import expression_text


def free_name(wanted: str, taken: set[str]) -> str:
    """`wanted` as an identifier, or the first of `wanted_2`, `wanted_3`, ... that is not among `taken`; added to it."""
    wanted = re.sub(r"\W", "_", wanted)
    name, count = wanted, 2
    while name in taken:
        name, count = f"{wanted}_{count}", count + 1
    taken.add(name)
    return name


def column_name(program: Program, value: Node, index: int, taken: set[str]) -> str:
    """The name of a column of the scalar table."""
    name = program.labels.get(value, str(value.arg) if value.op in (Op.HYPER, Op.MODEL_HYPER, Op.RESULT) else "")
    name = re.sub(r"\W", "_", name or _words(value))
    return free_name(name if name and name not in taken else f"scalar_{index}", taken)


def _words(value: Node) -> str:
    """A short expression as a name: `1 - beta1` is `one_minus_beta1`, `sqrt(1 - beta2**t)` `sqrt_one_minus_beta2_t`."""
    if value.op is Op.SQRT:
        inner = _words(value.args[0])
        return inner and f"sqrt_{inner}"
    if value.op is not Op.SUB or value.args[0] is not const(1) or value.size > 5:
        return ""
    found = re.fullmatch(r"1 - (\w+)(\*\*t)?", expression_text(value))
    return f"one_minus_{found[1]}{'_t' if found[2] else ''}" if found else ""
