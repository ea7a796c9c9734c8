"""One name, one meaning: a class name that several adapters use is a word of CONTRIBUTING.md's table."""

from __future__ import annotations

import ast
import re
from collections import defaultdict

from tests.test_layering import ROOT

#: The folders of the adapters, and the runtime that they stand on.
FOLDERS = ("runtime", "functional", "array", "torch", "jax", "mlx", "keras")


def classes() -> dict[str, set[str]]:
    """The modules that define a class of each name; the families of evolution strategies have names of their own."""
    modules = defaultdict(set)
    for folder in FOLDERS:
        for file in (ROOT / "rulec" / folder).rglob("*.py"):
            parts = file.relative_to(ROOT / "rulec").with_suffix("").parts
            for item in ast.parse(file.read_text()).body if "es" not in parts else ():
                if isinstance(item, ast.ClassDef) and not item.name.startswith("_"):
                    modules[item.name].add(".".join(parts))
    return modules


def words() -> dict[str, set[str]]:
    """The classes of the table, with their modules."""
    section = (ROOT / "CONTRIBUTING.md").read_text().partition("### Words of the adapters\n")[2].partition("\n## ")[0]
    modules = defaultdict(set)
    for module, name in re.findall(r"`([a-z_.]+)\.([A-Z]\w+)`", section):
        modules[name].add(module)
    return modules


def test_a_class_name_of_several_adapters_is_a_word_with_one_meaning() -> None:
    several = {name: modules for name, modules in classes().items() if len(modules) > 1}
    assert several == {name: modules for name, modules in words().items() if len(modules) > 1}


def test_every_word_names_classes_that_there_are() -> None:
    known = classes()
    assert {name: modules - known[name] for name, modules in words().items() if modules - known[name]} == {}
