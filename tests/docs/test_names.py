"""Every name of an installed library has a meaning here, and every meaning is a rule that loads."""

from __future__ import annotations

import importlib
import inspect

import optax
import pytest
import pytorch_optimizer
import torch

from rulec.cli.arguments import find_rule
from rulec.language.library import rules
from tests.docs.names_table import FILE, kind, names


def test_every_optimizer_of_torch_and_pytorch_optimizer_has_a_line() -> None:
    classes = {name for name in dir(torch.optim) if inspect.isclass(getattr(torch.optim, name))} - {"Optimizer"}
    assert set(names()["torch.optim"]) == classes
    assert set(names()["pytorch_optimizer"]) == set(pytorch_optimizer.get_supported_optimizers())


@pytest.mark.parametrize(("library", "module"), [("optax", optax), ("optax.contrib", optax.contrib)])
def test_every_line_of_optax_is_a_function(library: str, module: object) -> None:
    assert [name for name in names()[library] if not callable(getattr(module, name, None))] == []


def test_every_meaning_loads() -> None:
    for meaning in {m for meanings in names().values() for m in meanings.values() if isinstance(m, str)}:
        assert find_rule(meaning).name


def test_every_name_of_code_is_there() -> None:
    meanings = [m for each in names().values() for m in each.values() if not isinstance(m, str)]
    code = {meaning["code"] for meaning in meanings if "code" in meaning}
    assert code
    for name in code:
        module, _, attribute = name.rpartition(".")
        assert callable(getattr(importlib.import_module(module), attribute))
    tests = {meaning["compared"] for meaning in meanings if "compared" in meaning}
    assert [name for name in tests if not (FILE.parents[2] / name).is_file()] == []


def test_what_is_missing_is_no_rule_of_the_library() -> None:
    written = {name.removeprefix("transforms/").replace("_", "") for name in rules()}
    missing = {
        name for meanings in names().values() for name, meaning in meanings.items() if kind(meaning) == "missing"
    }
    assert [name for name in sorted(missing) if name.lower().replace("_", "") in written] == []
