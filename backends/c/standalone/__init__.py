"""A rule as C99: a source, its header, and modules for other languages."""

from __future__ import annotations

from collections.abc import Mapping

from rulec.language.rule import Rule
from rulec.runtime.storage.options import Storage

from .fortran import fortran_text
from .header import header_text
from .julia import julia_text
from .model import CFile
from .source import Source


def files(rule: Rule, name: str, dtype: str, storage: Storage) -> Mapping[str, str]:
    """The source, its header, and the declarations for Fortran and Julia, by file name."""
    file = CFile(rule, name, dtype, storage)
    return {
        f"{name}.c": Source(file).text(), f"{name}.h": header_text(file), f"{name}.f90": fortran_text(file),
        f"{name}.jl": julia_text(file),
    }  # fmt: skip
