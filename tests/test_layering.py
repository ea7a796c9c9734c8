"""The way of the data goes in one direction: which folders import what, and what `import rulec` costs.

language, compiler, backend and runtime know no framework; the bundled backends import theirs inside `build`. So every
rule's source can be printed, for any backend, on a machine that has none of them.
"""

from __future__ import annotations

import ast
import functools
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import rulec
from tests.library import by_share

ROOT = Path(__file__).resolve().parent.parent
TRAINERS = frozenset({
    "accelerate", "fastai", "hydra", "ignite", "lightning", "peft", "pytorch_lightning", "schedulefree", "skorch",
    "timm", "torchtitan", "transformers", "trl",
})  # fmt: skip
FRAMEWORKS = frozenset({"torch", "jax", "jaxlib", "optax", "keras", "mlx", "numba", "llvmlite", "triton", "cupy"})
HEAVY = FRAMEWORKS | {"sympy", "mpmath", "matplotlib", "sklearn", "scipy", "pydantic", "typer", "click", "rich"}
#: The folders in the order of the data. A folder imports those before it.
LAYERS = (
    "language", "array_api", "formats", "compiler", "analysis", "memory", "checkpoint", "backend", "kernel", "es",
    "runtime", "functional", "standalone", "backends", "array", "torch", "jax", "mlx", "keras", "integrations",
    "testing", "tools", "cli", "benchmarks", "gallery",
)  # fmt: skip
#: Those beside the folder `rulec`.
OUTSIDE = ("backends", "benchmarks", "gallery")
#: `Rule.analysis` asks for the analysis when it is read; `rulec bench` runs what lies in a checkout.
UPWARD = {("language", "analysis"), ("cli", "benchmarks")}
PURE = tuple(f"rulec/{name}" for name in LAYERS[: LAYERS.index("standalone")] if name != "es")


@functools.cache
def imports(file: Path) -> list[tuple[int, str, bool]]:
    """What `_imports` gives: every file is read once."""
    return [*_imports(file)]


def _imports(file: Path) -> Iterator[tuple[int, str, bool]]:
    """(line, absolute dotted name, whether it runs when the file is imported) of every name a file imports."""
    waiting: list[tuple[ast.AST, bool]] = [(ast.parse(file.read_text(), filename=str(file)), True)]
    while waiting:
        node, at_once = waiting.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            source = f"{origin(node, file)}." if isinstance(node, ast.ImportFrom) else ""
            for alias in node.names:
                yield node.lineno, source + alias.name, at_once
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or is_type_checking(node):
            at_once = False
        inner = ast.iter_child_nodes(node)
        waiting += [(child, at_once) for child in inner if not isinstance(child, ast.expr | ast.expr_context)]


def origin(node: ast.ImportFrom, file: Path) -> str:
    """The absolute name of the module that a `from ... import` reads."""
    package = file.parent.relative_to(ROOT).parts
    above = package[: len(package) - node.level + 1] if node.level else ()
    return ".".join((*above, *(node.module.split(".") if node.module else ())))


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def offences(folder: str, forbidden: frozenset[str], *, only_when_imported: bool) -> list[str]:
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files, f"no modules in {folder}"
    return [
        f"{file.relative_to(ROOT)}:{line} imports {module}"
        for file in files
        for line, module, when_imported in imports(file)
        if module.partition(".")[0] in forbidden and (when_imported or not only_when_imported)
    ]


@pytest.mark.parametrize("folder", PURE)
def test_pure_folders_import_no_framework_at_all(folder: str) -> None:
    assert offences(folder, FRAMEWORKS | {"rulec_backends"}, only_when_imported=False) == []


def layer_folder(layer: str) -> Path:
    return ROOT / layer if layer in OUTSIDE else ROOT / "rulec" / layer


def layer_of(module: str) -> str | None:
    """The layer of an absolute dotted name; None for what is none of ours or lies in no folder."""
    top, _, rest = module.partition(".")
    name = top.removeprefix("rulec_") if top.removeprefix("rulec_") in OUTSIDE else rest.partition(".")[0]
    return name if top in ("rulec", "rulec_backends", "benchmarks", "gallery") and name in LAYERS else None


def test_every_folder_is_a_layer() -> None:
    folders = {file.parent.name for file in (ROOT / "rulec").glob("*/__init__.py")}
    assert folders | {*OUTSIDE} == set(LAYERS)


@pytest.mark.parametrize("layer", LAYERS)
def test_layers_import_only_those_before_them(layer: str) -> None:
    """Inside functions too: an arrow that points upward is one whenever it runs."""
    allowed = {*LAYERS[: LAYERS.index(layer) + 1], *(above for below, above in UPWARD if below == layer)}
    upward = [
        f"{file.relative_to(ROOT)}:{line} imports {module}"
        for file in sorted(layer_folder(layer).rglob("*.py"))
        for line, module, _ in imports(file)
        if layer_of(module) not in {None, *allowed}
    ]
    assert upward == []


def test_backends_import_nothing_heavy_at_module_level() -> None:
    assert offences("backends", HEAVY, only_when_imported=True) == []


@pytest.mark.parametrize(
    ("adapter", "framework"),
    [("torch", {"torch"}), ("jax", {"jax", "jaxlib", "optax"}), ("mlx", {"mlx"}), ("array", set())],
)
def test_adapters_import_nothing_heavy_but_their_framework(adapter: str, framework: set[str]) -> None:
    assert offences(f"rulec/{adapter}", HEAVY - framework, only_when_imported=True) == []


def test_integrations_import_a_trainer_when_a_function_is_called() -> None:
    assert offences("rulec/integrations", (HEAVY | TRAINERS) - {"torch"}, only_when_imported=True) == []


def test_only_integrations_know_trainers() -> None:
    """`rulec memory` makes models of transformers, and nothing else does."""
    lines = [place for place in offences("rulec", TRAINERS, only_when_imported=False) if "/integrations/" not in place]
    assert [place for place in lines if not place.startswith("rulec/torch/memory_profile/")] == []


def test_sympy_is_only_in_symbolic() -> None:
    found = offences("rulec", frozenset({"sympy"}), only_when_imported=False)
    assert [place for place in found if not place.startswith("rulec/language/export/sympy.py:")] == []


def in_a_process(program: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env={**os.environ, **environment},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_is_light() -> None:
    loaded = in_a_process("import sys, rulec; print(*sorted({name.partition('.')[0] for name in sys.modules}))").split()
    assert "rulec" in loaded
    assert sorted(HEAVY & set(loaded)) == []


EMIT_EVERYTHING = """
import hashlib
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in FRAMEWORKS:
            raise ModuleNotFoundError(f"{name} is not to be imported here", name=name)

sys.meta_path.insert(0, Absent())

import rulec
from rulec.backend import registry
from rulec.compiler.layout import kernel_for

for backend in map(registry.get, BUNDLED):
    for name in NAMES:
        rule = rulec.load(name)
        program = rulec.compile(rule(*[rulec.load("adam")] * len(rule.wraps)) if rule.wraps else rule)
        if backend.name in ("jax", "mlx", "triton") and not program.elementwise:
            continue
        for dtype in DTYPES:
            source = backend.emit(*kernel_for(program, dtype))
            print(backend.name, name, dtype, len(source), hashlib.sha256(source.encode()).hexdigest())
"""


@pytest.mark.parametrize("names", by_share(rulec.rules(), "emitted"))
def test_every_rule_is_emitted_where_no_framework_can_be_imported(names: list[str]) -> None:
    """In two processes that order their sets differently: equal text is what the disk cache is keyed by.

    The second prints one dtype: the order of a set does not depend on it. Every day tests/golden compares the text of
    some rules, in processes of any order, and the test above reads what the backends import.
    """
    found = entry_points(group="rulec.backends")
    bundled = sorted(entry.name for entry in found if entry.module.startswith("rulec_backends."))
    blocked = sorted(FRAMEWORKS | {"sympy", "mpmath"})
    program = f"FRAMEWORKS = {blocked}\nBUNDLED = {bundled}\nNAMES = {names}\n{EMIT_EVERYTHING}"
    printed = in_a_process(f"DTYPES = ('float32', 'float64', 'bfloat16')\n{program}", PYTHONHASHSEED="1")
    again = in_a_process(f"DTYPES = ('float32',)\n{program}", PYTHONHASHSEED="2")
    lines = [line.split() for line in printed.splitlines()]
    assert [line.split() for line in again.splitlines()] == [line for line in lines if line[2] == "float32"]
    assert {backend for backend, *_ in lines} == {"numpy", "cpu", "c", "cupy", "triton", "jax", "mlx"}
    assert {rule for _, rule, *_ in lines} == {*names}
    assert all(int(length) > 0 for _, _, _, length, _ in lines)
