"""Fixed parts of printed kernels: texts with marks, polynomials, and functions printed only where they are used."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence


def filled(text: str, marks: Mapping[str, object]) -> str:
    """A text with a part in place of each mark. A part with marks in it comes before the parts of these marks."""
    for mark, part in marks.items():
        text = text.replace(mark, str(part))
    return text


def polynomial(name: str, terms: Sequence[str]) -> str:
    """A polynomial of a variable by Horner's scheme, from its coefficients as text, constant first."""
    *first, text = terms
    for term in reversed(first):
        text = f"({term} + {name} * {text})"
    return text


def used(parts: Mapping[str, str], text: str, code: Callable[[str], str] = str) -> list[str]:
    """The parts that a text uses, directly or through other parts; each stands before its use.

    `parts` maps a pattern of a use to the text of the part; a part comes after the parts it uses. `code` removes
    comments from a text.
    """
    needed: list[str] = []
    seen = [code(text)]
    for pattern, part in reversed(list(parts.items())):
        if any(re.search(pattern, one) for one in seen):
            needed.insert(0, part)
            seen.append(code(part))
    return needed
