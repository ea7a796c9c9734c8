"""A rule as C99: a source, its header, and modules for other languages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from rulec.errors import RulecError
from rulec.language.rule import Rule
from rulec.language.source import did_you_mean
from rulec.runtime.storage.options import Storage

from .fortran import fortran_text
from .header import header_text
from .julia import julia_text
from .model import CFile
from .rust import rust_text
from .source import Source

#: The languages of the modules: the ending of a file, and the function that prints its text.
LANGUAGES: Mapping[str, tuple[str, Callable[[CFile], str]]] = MappingProxyType(
    {"fortran": ("f90", fortran_text), "julia": ("jl", julia_text), "rust": ("rs", rust_text)}
)

#: The languages of the modules where none is chosen.
USUAL = ("fortran", "julia")


def files(
    rule: Rule, name: str, dtype: str, storage: Storage, bindings: Sequence[str] = USUAL
) -> Mapping[str, str]:  # fmt: skip
    """The source, its header, and a module for each language of `bindings`, by file name.

    RulecError for an unknown language, and for a name that a language has for itself.
    """
    for language in bindings:
        if language not in LANGUAGES:
            near, known = did_you_mean(language, LANGUAGES), ", ".join(LANGUAGES)
            raise RulecError(f"rulec build has no --bindings {language!r}{near}: choose among {known}")
    file = CFile(rule, name, dtype, storage)
    modules = {f"{name}.{ending}": text(file) for ending, text in (LANGUAGES[x] for x in bindings)}
    return {f"{name}.c": Source(file).text(), f"{name}.h": header_text(file), **modules}
