"""The rules that README.md and the manual show: in files, in strings, and as Python functions."""

from __future__ import annotations

import ast
import contextlib
import os
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import rulec
from rulec.errors import RulecError
from tests.docs.markdown import Block, blocks, pages

#: What prints the library, which every backend is checked with anyway.
_LIBRARY = "rule-files.md"


def shown_rules(folder: Path) -> dict[str, rulec.Rule]:
    """Every rule that a page shows and that is none of the library, by its name; wrappers around Adam.

    Files are written to `folder`, which must be empty. What a page shows as a mistake is left out.
    """
    found: dict[str, rulec.Rule] = {}
    with contextlib.chdir(folder):
        for page in pages():
            if page.name != _LIBRARY:
                for rule in _of_page(blocks(page.read_text())):
                    whole = rule(*[rulec.load("adam")] * len(rule.wraps)) if rule.wraps else rule
                    found.setdefault(whole.name, whole)
    return found


def _of_page(page: list[Block]) -> Iterator[rulec.Rule]:
    for block in page:
        if block.title is not None:
            Path(block.title).write_text(block.text)
        with contextlib.suppress(RulecError):
            if block.language == "yaml":
                yield rulec.parse(block.text, block.title or "rule.yaml", os.curdir)
            elif block.language == "python":
                yield from _of_python(block)


def _of_python(block: Block) -> Iterator[rulec.Rule]:
    """Rules that are named or written out in strings, and functions that describe one."""
    tree = ast.parse(block.text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            with contextlib.suppress(RulecError, OSError):
                if "step: " in node.value:
                    yield rulec.parse(node.value)
                elif node.value.endswith(".yaml") or " " in node.value or "(" in node.value:
                    yield rulec.load(node.value)
    if "@rulec.rule" in block.text:
        kept = [n for n in tree.body if isinstance(n, ast.Import | ast.ImportFrom | ast.FunctionDef)]
        file = Path("shown_functions.py")
        file.write_text("import rulec\n" + ast.unparse(ast.Module(kept, [])))
        module = ModuleType("shown_functions")
        SourceFileLoader(module.__name__, str(file)).exec_module(module)
        yield from (value for value in vars(module).values() if isinstance(value, rulec.Rule))
