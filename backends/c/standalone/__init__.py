"""A rule as C99: a source, its header, and modules for other languages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from rulec.errors import RulecError
from rulec.language.rule import Rule
from rulec.language.source import did_you_mean
from rulec.runtime.storage.options import Storage

from .fortran import fortran_files
from .header import header_text
from .julia import julia_text
from .model import CFile
from .rust import rust_text
from .source import Source

#: The languages of the modules: the function that prints the files of each, by file name.
LANGUAGES: Mapping[str, Callable[[CFile], Mapping[str, str]]] = MappingProxyType(
    {
        "fortran": fortran_files,
        "julia": lambda file: {f"{file.name}.jl": julia_text(file)},
        "rust": lambda file: {f"{file.name}.rs": rust_text(file)},
    }
)

#: The languages of the modules where none is chosen.
USUAL = ("fortran", "julia")


def files(
    rule: Rule, name: str, dtype: str, storage: Storage, bindings: Sequence[str] = USUAL
) -> Mapping[str, str]:  # fmt: skip
    """The source, its header, and a module for each language of `bindings`, by file name.

    RulecError for an unknown language, and for a name that a language or a file of it has for itself.
    """
    for language in bindings:
        if language not in LANGUAGES:
            near, known = did_you_mean(language, LANGUAGES), ", ".join(LANGUAGES)
            raise RulecError(f"rulec build has no --bindings {language!r}{near}: choose among {known}")
    file = CFile(rule, name, dtype, storage)
    printed = {f"{name}.c": Source(file).text(), f"{name}.h": header_text(file)}
    for language in bindings:
        printed |= LANGUAGES[language](file)
    return printed
