"""The folders of the code, and the walk of a step through them, as the manual shows them: made from the imports."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Iterator, Mapping
from itertools import groupby

import networkx

from tests.docs.table import table
from tests.docs.walks import DATA
from tests.shape import import_graph
from tests.test_layering import LAYERS, OUTSIDE, ROOT, UPWARD

#: Packages whose folders have rows of their own.
_DIVIDED = ("language", "runtime", "torch", "tools", "es", "jax", "array", "kernel", "backends")


def path_of(module: str) -> str:
    """The file or folder of a dotted name, from the root of a checkout."""
    return module.replace("rulec_backends", "backends").replace(".", "/")


def holds(path: str) -> str:
    """The first sentence of the docstring of a module or a package."""
    file = ROOT / path
    file = file / "__init__.py" if file.is_dir() else file
    text = ast.get_docstring(ast.parse(file.read_text())) or ""
    return " ".join(text.split("\n\n")[0].split()).removesuffix(".")


def packages() -> Iterator[str]:
    """The dotted names of all folders with a row, in the order of the data."""
    for layer in LAYERS:
        if layer in ("benchmarks", "gallery"):
            continue
        package = f"rulec_{layer}" if layer in OUTSIDE else f"rulec.{layer}"
        yield package
        if layer in _DIVIDED:
            folder = ROOT / path_of(package)
            yield from sorted(f"{package}.{init.parent.name}" for init in folder.glob("*/__init__.py"))


def folder_of(module: str, known: list[str]) -> str | None:
    """The innermost of the folders that a module lies in."""
    return max((name for name in known if module == name or module.startswith(f"{name}.")), key=len, default=None)


def imports_of_folders() -> networkx.DiGraph:
    """An edge from each folder to every other whose modules it imports."""
    known = [*packages()]
    graph = networkx.DiGraph()
    graph.add_nodes_from(known)
    for name, target in import_graph().edges:
        one, other = folder_of(name, known), folder_of(target, known)
        if one and other and one != other:
            graph.add_edge(one, other)
    return graph


def folders() -> str:
    """A row for each folder: its contents, the folders that it imports, and its users."""
    graph = imports_of_folders()
    rows = []
    for name in packages():
        down, up = (_names(name, found) for found in (graph.successors(name), graph.predecessors(name)))
        rows.append([f"`{path_of(name)}`", holds(path_of(name)), down, up])
    return table(["folder", "holds", "imports", "a change may touch"], rows)


def _names(of: str, others: Iterator[str]) -> str:
    """Short names, as they are seen from a folder; the many users of a common folder by their number."""
    top = ".".join(of.split(".")[:2])
    short = sorted({path_of(name.removeprefix(f"{top}.")).removeprefix("rulec/") for name in others})
    return ", ".join(short) if len(short) <= 8 else f"{len(short)} folders"


def house() -> str:
    """The top folders on their floors: each imports folders below it only; `Rule.analysis` alone looks upward."""
    graph = networkx.DiGraph()
    for one, other in imports_of_folders().edges:
        a, b = (path_of(".".join(each.split(".")[:2]) if each.startswith("rulec.") else each.split(".")[0])
                for each in (one, other))  # fmt: skip
        if a != b and (a.removeprefix("rulec/"), b.removeprefix("rulec/")) not in UPWARD:
            graph.add_edge(a, b)
    floor: dict[str, int] = {}
    for name in reversed([*networkx.topological_sort(graph)]):
        floor[name] = 1 + max((floor[below] for below in graph.successors(name)), default=-1)
    floors = groupby(sorted(floor, key=lambda name: (-floor[name], name)), key=floor.__getitem__)
    return table(
        ["floor", "folders"], [[str(number), ", ".join(f"`{name}`" for name in names)] for number, names in floors]
    )


def walks() -> str:
    """Each walk as a table: the modules in the order of their first call."""
    parts = []
    for title, walk in json.loads(DATA.read_text()).items():
        calls = walk["modules"]
        rows = [[f"`{module}`", str(count), holds(module)] for module, count in calls.items()]
        head = f"**{title}**: {len(calls)} modules, {walk['classes']} classes, {sum(calls.values())} Python calls."
        parts.append(f"{head}\n\n{table(['module', 'calls', 'holds'], rows)}")
    return "\n\n".join(parts)


MAKERS: Mapping[str, Callable[[], str]] = {"house": house, "folders": folders, "walks": walks}
