"""Fixed parts of printed kernels: texts with marks, polynomials, and functions that are printed where they are used."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence


def filled(text: str, marks: Mapping[str, object]) -> str:
    """A text with what stands for its marks: those that have others in them come first."""
    for mark, part in marks.items():
        text = text.replace(mark, str(part))
    return text


def polynomial(name: str, terms: Sequence[str]) -> str:
    """A polynomial of a name by Horner's scheme, from its coefficients as text."""
    *first, text = terms
    for term in reversed(first):
        text = f"({term} + {name} * {text})"
    return text


def used(parts: Mapping[str, str], text: str, code: Callable[[str], str] = str) -> list[str]:
    """The parts that a text uses, directly or through others; each stands before its use.

    `parts` have patterns of what uses them, and come after those that they use. `code` is a text without comments.
    """
    found: list[str] = []
    seen = [code(text)]
    for pattern, part in reversed(list(parts.items())):
        if any(re.search(pattern, one) for one in seen):
            found.insert(0, part)
            seen.append(code(part))
    return found
