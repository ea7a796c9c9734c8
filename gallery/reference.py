"""The manual's reference that is made of files elsewhere: a page for each public module, and the changelog.

A page of a module has the lines by which mkdocstrings shows the names in its `__all__`. Classes and functions that
stand for rules of the library are left out: they are alike, and the gallery has a page for each rule.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

#: Page -> the module and the text below its title.
MODULES = {
    "rulec": ("rulec", "Functions and classes that read, write, compose and compile rules."),
    "torch": (
        "rulec.torch",
        "Optimizers for PyTorch. The module also has a class for each rule, which this page leaves out: "
        "[use it in PyTorch](../torch.md) explains these classes and their keywords.",
    ),
    "jax": (
        "rulec.jax",
        "Transformations in the form of optax, and compiled steps. The module also has functions with the names of "
        "optax, such as `adamw`, which this page leaves out: [coming from optax](../optax.md) lists them.",
    ),
    "array": ("rulec.array", "Optimizers that update NumPy arrays in place: [use it on arrays](../arrays.md)."),
    "mlx": (
        "rulec.mlx",
        "Optimizers for MLX. The module also has a class for each rule, which this page leaves out: "
        "[use it in MLX](../mlx.md).",
    ),
    "keras": ("rulec.keras", "Optimizers for `model.compile` in Keras, from any rule: [use it in Keras](../keras.md)."),
    "testing": (
        "rulec.testing",
        "The conformance suite, which tests a backend: [write a backend](../write-a-backend.md).",
    ),
}


def pages() -> dict[str, str]:
    """Path of a page below docs/ -> its Markdown: the modules, and the changelog."""
    modules = {f"api/{name}.md": page(module, text) for name, (module, text) in MODULES.items()}
    return {**modules, "changelog.md": (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").replace("](docs/", "](")}


def page(module: str, text: str) -> str:
    """The page of a module."""
    shown = "\n\n".join(f"::: {source}.{name}" for name, source in public_names(module).items())
    return f"# {module}\n\n{text}\n\n{shown}\n"


def public_names(module: str) -> Mapping[str, str]:
    """The names in `__all__` of a module in the order of the alphabet, each with the module that it is imported from.

    A name may be a module's as well, so objects are named by the place where they are defined.
    """
    tree = ast.parse((ROOT / Path(*module.split(".")) / "__init__.py").read_text(encoding="utf-8"))
    public: set[str] = set()
    sources: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            public |= {str(each.value) for each in ast.walk(node.value) if isinstance(each, ast.Constant)}
        elif isinstance(node, ast.ImportFrom) and node.module not in (None, module):
            sources |= {alias.asname or alias.name: str(node.module) for alias in node.names}
    return {name: sources[name] for name in sorted(public & sources.keys())}
