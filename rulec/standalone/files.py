"""What `rulec build` writes for a backend: the texts of files, by name."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import cast

from rulec.errors import RulecError
from rulec.language.rule import Rule
from rulec.language.source import did_you_mean
from rulec.standalone.prose import file_name

#: The backends that a rule is written for, each by its module `<backend>_standalone`.
WRITTEN = ("c", "triton", "cupy", "jax", "numpy")


def written(
    rule: Rule, backend: str, *, name: str = "", dtype: str = "float32", state_dtype: str = ""
) -> Mapping[str, str]:
    """The files of a rule for a backend, by name: always the same for the same rule.

    `name` is what files and functions are called, by default the rule's own. Raises RulecError for a backend that is
    written nowhere, and CannotBuild, with the reason, for a rule that has no such form.
    """
    if backend not in WRITTEN:
        known = ", ".join(WRITTEN)
        raise RulecError(f"rulec build writes nothing for {backend!r}{did_you_mean(backend, WRITTEN)}: choose {known}")
    writer = importlib.import_module(f"rulec_backends.{backend}.standalone")
    return cast(Mapping[str, str], writer.files(rule, file_name(rule, name), dtype, state_dtype))
