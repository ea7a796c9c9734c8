"""Rules of Python files, of modules, and of installed packages.

Only programs and command lines name such rules. The text of a rule file or a checkpoint never runs Python.
"""

from __future__ import annotations

import functools
import importlib
import os
import re
import traceback
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType

from rulec.errors import RulecError, RuleError
from rulec.language.rule import Rule
from rulec.language.source import did_you_mean
from rulec.plugins import loaded, package_of, points_of

#: The group of entry points by which a package adds rules: a rule's name -> `module:rule`.
GROUP = "rulec.rules"

_MODULE = re.compile(r"[A-Za-z_][\w.]*:\w+")


def is_python_name(name: str) -> bool:
    """Whether a name stands for a rule in Python: `my.py`, `my.py:rule` or `package.module:rule`."""
    return name.rpartition(":")[0].endswith(".py") or name.endswith(".py") or _MODULE.fullmatch(name) is not None


def python_rule(name: str) -> Rule:
    """The rule of a Python file or module. The file or module runs: it is the user's own program.

    RuleError for a missing file, module or rule, and for a file with several rules where the name has none of them.
    """
    if name.endswith(".py"):
        return _only_rule(name)
    where, _, attribute = name.rpartition(":")
    rules = _rules_of(where)
    if attribute not in rules:
        raise RuleError(f"{where} has no rule {attribute!r}{did_you_mean(attribute, rules)}")
    return rules[attribute]


def _only_rule(file: str) -> Rule:
    rules = _rules_of(file)
    if len(rules) != 1:
        has = f"the rules {', '.join(rules)}" if rules else "no rule: decorate a function with @rulec.rule"
        raise RuleError(f"{file} has {has}" + (f"; name one of them, {file}:{next(iter(rules))}" if rules else ""))
    return next(iter(rules.values()))


def _rules_of(where: str) -> dict[str, Rule]:
    return {name: value for name, value in vars(python_module(where)).items() if isinstance(value, Rule)}


def python_module(where: str) -> ModuleType:
    """The module of a Python file, `my.py`, or of a dotted name; it runs. RuleError where there is none."""
    return _file(Path(where)) if where.endswith(".py") else _module(where)


def _file(path: Path) -> ModuleType:
    import importlib.util

    if not os.path.isfile(path):
        raise RuleError(f"there is no Python file {str(path)!r}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None  # the name ends in .py
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except RulecError:
        raise
    except Exception as error:
        raise RuleError(f"{path}{_line(error, path)}: {type(error).__name__}: {error}") from error
    return module


def _line(error: Exception, path: Path) -> str:
    """`:7` for the last line of a file that an error went through; empty where it is not known."""
    file, frames = os.path.abspath(path), traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if os.path.abspath(frame.filename) == file]
    line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else None
    return f":{line}" if line else ""


def _module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the module is here, and imports one that is not
        raise RuleError(f"there is no module {error.name!r}: install it, or start where it can be imported") from None


@functools.cache
def installed() -> dict[str, tuple[EntryPoint, ...]]:
    """Rule's name -> entry points, for the rules that installed packages add. None of them is imported."""
    return points_of(GROUP)


def installed_rule(name: str) -> Rule:
    """The rule that a package adds under a name.

    RuleError where it cannot be loaded or is no rule, and where two packages add one name.
    """
    points = installed()[name]
    try:
        rule = loaded(f"rule {name!r}", points)
    except RulecError as error:
        raise RuleError(str(error)) from error.__cause__
    if not isinstance(rule, Rule):
        raise RuleError(f"{points[0].value} of {package_of(points[0])} is no rule, but of type {type(rule).__name__}")
    return rule
