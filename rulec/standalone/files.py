"""The files that `rulec build` writes for a backend: name -> text."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import cast

from rulec.errors import RulecError
from rulec.language.rule import Rule
from rulec.language.source import did_you_mean
from rulec.standalone.prose import file_name

#: The backends with files of their own, each written by its module `<backend>.standalone`.
WRITTEN = ("c", "triton", "cupy", "jax", "numpy")


def written(
    rule: Rule, backend: str, *, name: str = "", dtype: str = "float32", state_dtype: str = ""
) -> Mapping[str, str]:
    """Name -> text of the files of a rule for a backend, always the same for the same rule.

    `name` is the name of files and functions, by default the rule's own. Raises RulecError for a backend without files
    of its own, and CannotBuild, with the reason, for a rule without such a form.
    """
    if backend not in WRITTEN:
        known = ", ".join(WRITTEN)
        raise RulecError(f"rulec build writes nothing for {backend!r}{did_you_mean(backend, WRITTEN)}: choose {known}")
    writer = importlib.import_module(f"rulec_backends.{backend}.standalone")
    return cast(Mapping[str, str], writer.files(rule, file_name(rule, name), dtype, state_dtype))
