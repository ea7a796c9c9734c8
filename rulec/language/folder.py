"""The folder of the rules that ship with rulec."""

from __future__ import annotations

import functools
from importlib.util import find_spec
from pathlib import Path

from rulec.errors import RuleError


@functools.cache
def library_folder() -> Path:
    """The folder of the rules that ship with rulec."""
    spec = find_spec("rulec_rules")
    if spec is None or spec.origin is None:
        raise RuleError("the rule library is not installed: install rulec again")
    return Path(spec.origin).parent
