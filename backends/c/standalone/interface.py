"""The words on a rule's C interface, for the modules in other languages."""

from __future__ import annotations

from rulec.standalone.prose import title

from .model import FUNCTIONS, CFile

#: The kinds of results of functions that other languages call.
RESULTS = ("bytes", "status", "steps")


def about(file: CFile) -> list[str]:
    """The lines at the beginning of a file that declares the functions."""
    return [
        title(file.rule), "",
        f"SPDX-License-Identifier: MIT. Printed by rulec; {file.name}.c has the notice, the mathematics and the paper.",
        f"What the functions do is said in {file.name}.h.",
    ]  # fmt: skip


def callable_words(file: CFile) -> list[str]:
    """The words of the functions for other languages."""
    return [word for word in file.words if FUNCTIONS[word][0] in RESULTS]
