"""rulec compiles optimizer rules: short symbolic mathematics in, fused kernels and optimizers out."""

from __future__ import annotations

from rulec.compiler.pipeline import compile
from rulec.errors import RulecError, RuleError
from rulec.language.library import load, parse, rules
from rulec.language.python import rule
from rulec.language.rule import Rule

__all__ = ["Rule", "RuleError", "RulecError", "compile", "load", "parse", "rule", "rules"]
__version__ = "0.1.0"
