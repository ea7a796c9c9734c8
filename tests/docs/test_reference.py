"""The manual's order, and its reference: errors and public names, each where a reader looks for it."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from gallery.reference import MODULES, pages, public_names
from rulec import errors
from rulec.torch.classes import class_names
from tests.docs.markdown import ROOT

SECTIONS = ["Tutorials", "How to", "Reference", "Explanation"]


def _nav() -> Any:
    """The navigation; the rest of the file has tags of MkDocs' own."""
    text = (ROOT / "mkdocs.yml").read_text()
    section = text[text.index("\nnav:\n") + 1 :]
    return yaml.safe_load(section[: section.index("\n\n")])["nav"]


def _pages(entry: Any) -> Iterator[str]:
    if isinstance(entry, str):
        yield entry
        return
    for each in entry.values() if isinstance(entry, dict) else entry:
        yield from _pages(each)


def test_every_page_has_one_place_and_its_own_title() -> None:
    """A page without a title in the navigation has that of its heading."""
    nav = _nav()
    assert [next(iter(each)) for each in nav if isinstance(each, dict)] == SECTIONS
    listed = sorted(_pages(nav))
    written = [page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")]
    assert listed == sorted([*written, *pages()])
    assert not any(isinstance(value, str) for each in _mappings(nav) for value in each.values())


def _mappings(entry: Any) -> Iterator[Any]:
    if isinstance(entry, dict):
        yield entry
        for value in entry.values():
            yield from _mappings(value)
    elif isinstance(entry, list):
        for each in entry:
            yield from _mappings(each)


def test_every_error_and_every_code_has_a_section() -> None:
    text = (ROOT / "docs" / "errors.md").read_text()
    public = [name for name, each in vars(errors).items() if isinstance(each, type) and issubclass(each, Exception)]
    assert re.findall(r"^## (\w+)", text, re.MULTILINE) == [name for name in public if name != "RulecError"]
    codes = re.findall(r"`(\w+)` for", errors.RuleError.__doc__ or "")
    assert sorted(re.findall(r"^### (\w+)", text, re.MULTILINE)) == sorted([*codes, "unread"])


@pytest.mark.parametrize("name", [name for name in MODULES if name != "keras"])
def test_public_names_are_on_the_page_of_their_module(name: str) -> None:
    """Names of rules are not: torch's classes, and optax's functions. Keras runs on one backend of a process."""
    module = importlib.import_module(MODULES[name][0])
    shown = public_names(module.__name__)
    assert all(f"::: {source}.{each}\n" in pages()[f"api/{name}.md"] for each, source in shown.items())
    assert all(
        getattr(importlib.import_module(source), each) is getattr(module, each) for each, source in shown.items()
    )
    assert all(getattr(module, each).__doc__ for each in shown)
    left_out = {*module.__all__} - {*shown}
    if name == "jax":
        left_out -= {"contrib", *vars(importlib.import_module("optax"))}
    assert left_out <= ({*class_names()} if name == "torch" else set())
