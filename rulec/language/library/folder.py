"""The folder of the rules that ship with rulec."""

from __future__ import annotations

import functools
import os
from importlib.util import find_spec
from pathlib import Path

from rulec.errors import RuleError


@functools.cache
def library_folder() -> Path:
    """The folder of the rules that ship with rulec. RuleError where there is none, as in a wheel that is imported."""
    spec = find_spec("rulec_rules")
    if spec is None or spec.origin is None:
        raise RuleError("the rule library is not installed: install rulec again")
    folder = Path(spec.origin).parent
    if not os.path.isdir(folder):
        raise RuleError(
            f"rulec reads files of its own and cannot be imported from an archive, as {folder} is: install it by pip"
        )
    return folder
