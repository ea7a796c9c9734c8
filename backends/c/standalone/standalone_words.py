"""Words of standalone C: the functions of `backends/cstyle`, conversions, and folds of the totals of blocks."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from rulec.compiler.ir import Program, Stage
from rulec.language.expr.node import Kind, Node

from ...cstyle import words as c_words
from ...cstyle.dialect import Dialect
from ...cstyle.element import STORAGE, ElementPrinter, literal

#: The C type of each stored dtype; elements of 16 bits move as integers.
TYPES: Mapping[str, str] = STORAGE

_NAMES = """
    malloc calloc free t fold_sum fold_min fold_max newton_schulz dot room
    i j k line column matrix chunk chunks tile tiles start stop top bottom left right height width batch rows cols
    count ndim shape param grad state head found view hyper work status bytes blocks parts at base end block aside
    below tall down across values element grad_scale first position origin
"""

#: Names that no value of a rule may have, with words of Fortran and Julia, where hyper-parameters are printed too.
RESERVED = (
    c_words.RESERVED | frozenset(_NAMES.split()) | {"end", "function", "module", "begin", "let", "global", "local"}
)

#: The language, for the c backend's printer.
C99 = Dialect("c", function="static inline", reserved=RESERVED)

_FOLD = """\
/* <what>: `parts` is blocks times count, and the result replaces its first block. */
static void <name>(double *parts, int64_t blocks, int64_t count)
{
    for (int64_t block = 1; block < blocks; block++) {
        for (int64_t i = 0; i < count; i++) {
            parts[i] = <folded>;
        }
    }
}
"""

_OTHER = "parts[block * count + i]"
_FOLDS: Mapping[str, tuple[str, str]] = {
    "fold_sum": ("Adds up what blocks left, in their order", f"parts[i] + {_OTHER}"),
    "fold_min": ("The least of what blocks left", f"minimum(parts[i], {_OTHER})"),
    "fold_max": ("The greatest of what blocks left", f"maximum(parts[i], {_OTHER})"),
}


def words_used(text: str) -> str:
    """The source of every function that a printed text calls without defining it, each before its use."""
    folds = [
        _FOLD.replace("<name>", name).replace("<what>", what).replace("<folded>", folded)
        for name, (what, folded) in _FOLDS.items()
        if re.search(rf"\b{name}\(", text)
    ]
    words = c_words.words_used("\n".join([*folds, text]), C99)
    return "".join(f"{word.rstrip()}\n\n" for word in [*words, *folds])


def widened(text: str, dtype: str) -> str:
    """A stored element as a double."""
    if dtype in ("bfloat16", "float16"):
        return f"from_{dtype}({text})"
    return text


def narrowed(text: str, dtype: str) -> str:
    """A double converted to a stored dtype, rounded once."""
    if dtype == "float64":
        return text
    if dtype == "float32":
        return (
            f"(float){text}"
            if re.fullmatch(r"[\w.>\[\]-]+|\w+\(.*\)", text) and "-" not in text[:1]
            else f"(float)({text})"
        )
    return f"to_{dtype}(to_odd({text}))"


def number_text(program: Program, value: Node, known: Callable[[Node], str | None]) -> str:
    """An expression in double. `known(value)` gives the text of a leaf or a named value, else None."""
    return ElementPrinter("c", program, Stage(), {}, literal, known=known).text(value)


def expression(program: Program, value: Node, leaf: Callable[[Node], str]) -> str:
    """An expression of numbers in double, with all its operands; `leaf` gives the text of a leaf."""
    return number_text(program, value, lambda n: leaf(n) if n.op.kind is Kind.LEAF else None)
