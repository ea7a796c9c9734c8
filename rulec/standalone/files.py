"""What `rulec build` writes for a backend: the texts of files, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rulec.errors import RulecError
from rulec.language.rule import Rule
from rulec.language.source import did_you_mean
from rulec.standalone.prose import file_name

#: Writes a rule under a name, for parameters of one dtype and states of another.
Writer = Callable[[Rule, str, str, str], Mapping[str, str]]


def _c(rule: Rule, name: str, dtype: str, state_dtype: str) -> Mapping[str, str]:
    from rulec.standalone.c_bindings import fortran_text, julia_text
    from rulec.standalone.c_file import CFile, Source
    from rulec.standalone.c_header import header_text

    file = CFile(rule, name, dtype, state_dtype)
    return {
        f"{name}.c": Source(file).text(), f"{name}.h": header_text(file), f"{name}.f90": fortran_text(file),
        f"{name}.jl": julia_text(file),
    }  # fmt: skip


WRITERS: Mapping[str, Writer] = {"c": _c}


def written(
    rule: Rule, backend: str, *, name: str = "", dtype: str = "float32", state_dtype: str = ""
) -> Mapping[str, str]:
    """The files of a rule for a backend, by name: always the same for the same rule.

    `name` is what files and functions are called, by default the rule's own. Raises RulecError for a backend that is
    written nowhere, and CannotBuild, with the reason, for a rule that has no such form.
    """
    if backend not in WRITERS:
        known = ", ".join(WRITERS)
        raise RulecError(f"rulec build writes nothing for {backend!r}{did_you_mean(backend, WRITERS)}: choose {known}")
    return WRITERS[backend](rule, file_name(rule, name), dtype, state_dtype)
