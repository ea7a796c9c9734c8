"""rulec compiles optimizer rules: short symbolic mathematics in, fused kernels and optimizers out."""

from __future__ import annotations

import importlib
from typing import Any

from rulec.compiler.pipeline import compile
from rulec.errors import RulecError, RuleError
from rulec.language.export.equations import from_sympy
from rulec.language.library.load import json_schema, load, parse, rules, variants
from rulec.language.partition import Part, Partition, part, partition
from rulec.language.rule import Rule
from rulec.language.tracing.decorator import rule

__all__ = [
    "Part", "Partition", "Rule", "RuleError", "RulecError", "compile", "from_sympy", "json_schema", "load", "parse",
    "part", "partition", "rule", "rules", "variants",
]  # fmt: skip
__version__ = "0.1.0"

#: Imported when first used: none of them may slow `import rulec` down.
_SUBMODULES = ("array", "backend", "bench", "math", "testing", "torch")


def __getattr__(name: str) -> Any:
    if name == "race":
        return importlib.import_module("rulec.tools.race").race
    if name in _SUBMODULES:
        return importlib.import_module(f"rulec.{name}")
    raise AttributeError(f"module 'rulec' has no attribute {name!r}")
