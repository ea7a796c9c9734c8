"""The call for the random number of an element, where kernels compute the element's place."""

from __future__ import annotations

from collections.abc import Sequence

from rulec.language.expr.node import RANGE, ROWS


def chance_call(places: Sequence[str], words: Sequence[str]) -> str:
    """The call of `chance` with places and words, as text.

    `places` has the element's place in memory, and for some functions the place of a loop's first element. `words` has
    the operands of the operation: five, and for a part of a tensor the facts of it.
    """
    piece = words[5:]
    if len(piece) == len(RANGE):
        places = [f"in_range({', '.join([place, *piece])})" for place in places]
    elif len(piece) == len(ROWS):  # an element may lie far from the first of its loop
        places = [f"in_rows({', '.join([places[0], *piece])})"] * len(places)
    return f"chance({', '.join([*places, *words[:5]])})"
