"""The manual's lists of what this version has: rules, adapters and backends, counted and named from the code."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points

import rulec
from tests.docs.families import families
from tests.docs.markdown import ROOT
from tests.docs.table import table

#: The packages in which users meet a framework, and the words for it.
ADAPTERS = {"torch": "PyTorch", "jax": "JAX", "mlx": "MLX", "keras": "Keras 3", "array": "arrays"}


def _first_sentence(path: str) -> str:
    text = ast.get_docstring(ast.parse((ROOT / path / "__init__.py").read_text())) or ""
    return " ".join(text.split("\n\n")[0].split())


def counted() -> str:
    """How many names the library has, of which kinds."""
    names = rulec.rules()
    wrappers = len(families()["Wrappers"])
    transforms = sum(name.startswith("transforms/") for name in names) - wrappers
    return (
        f"The library has {len(names)} names: {len(names) - transforms - wrappers} rules, {transforms} transforms and "
        f"{wrappers} wrappers. This page has all of them."
    )


def backends() -> str:
    """A row for each backend that rulec registers."""
    names = sorted(entry.name for entry in entry_points(group="rulec.backends"))
    rows = [[f"`{name}`", _of(f"backends/{name}")] for name in names if (ROOT / "backends" / name).is_dir()]
    return table(["backend", "what it is"], rows)


def adapters() -> str:
    """A row for each adapter."""
    rows = [[f"`rulec.{name}`", words, _of(f"rulec/{name}")] for name, words in ADAPTERS.items()]
    return table(["adapter", "for", "what it is"], rows)


def _of(path: str) -> str:
    """The words behind the colon of a docstring that begins with the name of its package."""
    sentence = _first_sentence(path)
    return (sentence.partition(": ")[2] or sentence).removesuffix(".")


MAKERS: Mapping[str, Callable[[], str]] = {"counted": counted, "backends": backends, "adapters": adapters}
