"""Every name of an installed library has a meaning here, and every meaning is a rule that loads."""

from __future__ import annotations

import importlib
import inspect

import optax
import pytest
import pytorch_optimizer
import torch

from rulec.cli.arguments import find_rule
from rulec.language.library.load import rules
from tests.docs.names_table import FILE, Meaning, libraries


def meanings() -> list[Meaning]:
    """The meanings of all names of all libraries."""
    return [meaning for library in libraries().values() for meaning in library.names.values()]


def test_every_optimizer_of_torch_and_pytorch_optimizer_has_a_line() -> None:
    classes = {name for name in dir(torch.optim) if inspect.isclass(getattr(torch.optim, name))} - {"Optimizer"}
    assert set(libraries()["torch.optim"].names) == classes
    assert set(libraries()["pytorch_optimizer"].names) == set(pytorch_optimizer.get_supported_optimizers())


@pytest.mark.parametrize(("library", "module"), [("optax", optax), ("optax.contrib", optax.contrib)])
def test_every_line_of_optax_is_a_function(library: str, module: object) -> None:
    assert [name for name in libraries()[library].names if not callable(getattr(module, name, None))] == []


def test_every_meaning_loads() -> None:
    for text in {meaning.text for meaning in meanings() if meaning.text}:
        assert find_rule(text).name


def test_a_name_is_here_or_missing() -> None:
    assert [m for m in meanings() if bool(m.text) + bool(m.code) + bool(m.missing) != 1] == []
    assert [meaning for meaning in meanings() if meaning.missing and meaning.differs] == []


def test_what_was_compared_once_is_here() -> None:
    for library in libraries().values():
        assert [name for name in library.compared if library.names[name].missing] == []


def test_every_name_of_code_is_there() -> None:
    code = {meaning.code for meaning in meanings() if meaning.code}
    assert code
    for name in code:
        module, _, attribute = name.rpartition(".")
        assert callable(getattr(importlib.import_module(module), attribute))
    tests = {meaning.compared for meaning in meanings() if meaning.compared}
    assert [name for name in tests if not (FILE.parents[2] / name).is_file()] == []


def test_what_is_missing_is_no_rule_of_the_library() -> None:
    written = {name.removeprefix("transforms/").replace("_", "") for name in rules()}
    missing = {name for library in libraries().values() for name, m in library.names.items() if m.missing}
    assert [name for name in sorted(missing) if name.lower().replace("_", "") in written] == []
