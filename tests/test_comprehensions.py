"""Variables of comprehensions: no name that another comprehension of the same function reads from its module.

Python 3.12.1 compiles comprehensions into their function, and takes such a name for a variable of the function
everywhere in it: an UnboundLocalError where the module's name is meant.
"""

from __future__ import annotations

import symtable
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.skipif(
    sys.version_info >= (3, 12), reason="symtable has no scopes of comprehensions from Python 3.12 on"
)

#: How symtable calls the scopes that are compiled into their function.
INLINED = ("listcomp", "setcomp", "dictcomp")


def scopes(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    yield table
    for child in table.get_children():
        yield from scopes(child)


def comprehensions(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    """The comprehensions of a scope, and the comprehensions inside of them."""
    for child in table.get_children():
        if child.get_name() in INLINED:
            yield child
            yield from comprehensions(child)


def mixed(source: str) -> set[tuple[str, str]]:
    """Functions, each with a name that is a variable of one comprehension and the module's in another."""
    seen = set()
    for scope in scopes(symtable.symtable(source, "source", "exec")):
        if scope.get_type() == "function" and scope.get_name() not in INLINED:
            symbols = [one for inner in comprehensions(scope) for one in inner.get_symbols()]
            bound = {one.get_name() for one in symbols if one.is_local()}
            read = {one.get_name() for one in symbols if one.is_global()}
            seen |= {(scope.get_name(), name) for name in bound & read}
    return seen


MIXED = """
def name(v): return v
def wrong(a): return {name: 1 for name in a}, [name(v) for v in a]
def right(a): return {key: 1 for key in a}, [name(v) for v in a], [[v for v in w] for w in a]
"""


def test_a_name_of_both_kinds_is_seen() -> None:
    assert mixed(MIXED) == {("wrong", "name")}


def test_no_name_is_of_both_kinds() -> None:
    files = [path for folder in ("rulec", "backends") for path in sorted((ROOT / folder).rglob("*.py"))]
    assert len(files) > 400
    assert {str(path.relative_to(ROOT)): names for path in files if (names := mixed(path.read_text()))} == {}
