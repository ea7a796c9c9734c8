"""The shape of the code in figures: lines of each folder, how long functions are, and circles of imports.

`make shape` prints it.
"""

from __future__ import annotations

import ast
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path

import networkx

from tests.test_layering import LAYERS, ROOT, imports, layer_folder


def files() -> list[Path]:
    """Every module of the library, its backends and its measurements."""
    folders = [layer_folder(layer) for layer in LAYERS]
    return [*(ROOT / "rulec").glob("*.py"), *(file for folder in folders for file in sorted(folder.rglob("*.py")))]


def lines(folder: Path) -> int:
    """The lines of all modules in a folder."""
    return sum(len(file.read_text().splitlines()) for file in folder.rglob("*.py"))


def function_lengths(file: Path) -> Iterator[int]:
    """The lines of each function's body, its docstring apart."""
    for item in ast.walk(ast.parse(file.read_text())):
        if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef):
            body = item.body[1:] if ast.get_docstring(item) is not None and len(item.body) > 1 else item.body
            yield (body[-1].end_lineno or 0) - body[0].lineno + 1


def module_name(file: Path) -> str:
    """The absolute name of a module."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    parts = ("rulec_backends", *parts[1:]) if parts[0] == "backends" else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def import_graph() -> networkx.DiGraph:
    """An edge from each module to every module that it imports; imports inside functions and for types count."""
    names = {module_name(file): file for file in files()}
    graph = networkx.DiGraph()
    for name, file in names.items():
        for _, imported, _ in imports(file):
            if imported.startswith("backends."):  # by a relative import
                imported = f"rulec_{imported}"
            target = imported if imported in names else imported.rpartition(".")[0]
            if target in names and target != name:
                graph.add_edge(name, target)
    return graph


def circles_of(graph: networkx.DiGraph) -> list[list[str]]:
    """The nodes that reach one another; the largest groups first."""
    found = [sorted(group) for group in networkx.strongly_connected_components(graph) if len(group) > 1]
    return sorted(found, key=lambda group: (-len(group), group))


def circles() -> list[list[str]]:
    """Modules that reach one another by imports; the largest circles first."""
    return circles_of(import_graph())


def folder_graph(package: str) -> networkx.DiGraph:
    """The imports between the sub-folders and the modules of a package, each sub-folder as one node."""
    depth = package.count(".") + 2
    graph = networkx.DiGraph()
    for name, target in import_graph().edges:
        if name.startswith(f"{package}.") and target.startswith(f"{package}."):
            one, other = (".".join(each.split(".")[:depth]) for each in (name, target))
            if one != other:
                graph.add_edge(one, other)
    return graph


def figures() -> Mapping[str, object]:
    """All of it."""
    lengths = sorted(length for file in files() for length in function_lengths(file))
    return {
        "lines": {layer: lines(layer_folder(layer)) for layer in LAYERS},
        "functions": len(lengths),
        "median function": statistics.median(lengths),
        "nine in ten functions, at most": lengths[len(lengths) * 9 // 10],
        "floors of folders in rulec.runtime": networkx.dag_longest_path_length(folder_graph("rulec.runtime")) + 1,
        "circles": [f"{len(group)}: {', '.join(group[:6])}{', ...' * (len(group) > 6)}" for group in circles()],
    }


def main() -> None:
    """Prints it."""
    for name, value in figures().items():
        if isinstance(value, Mapping):
            print(
                f"{name}: {sum(value.values())}", *(f"  {key:12} {count:6}" for key, count in value.items()), sep="\n"
            )
        elif isinstance(value, list):
            print(f"{name}:", *(f"  {item}" for item in value), sep="\n")
        else:
            print(f"{name}: {value}")


if __name__ == "__main__":
    main()
