"""Parameters as people keep them: an array, lists, tuples and dicts of arrays, nested as they like."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rulec.errors import TensorError


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """The leaves by name: `dense1/weight`, `0/1`; a single array is named `param`.

    TensorError where two have one name, as with the keys `0` and `"0"`.
    """
    by_name: dict[str, Any] = {}
    for name, leaf in _leaves(tree, prefix):
        if name in by_name:
            raise TensorError(f"two leaves are called {name} by the keys on their paths: give each a name of its own")
        by_name[name] = leaf
    return by_name


def _leaves(tree: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _leaves(value, f"{prefix}{key}/")
    elif isinstance(tree, list | tuple):
        for index, value in enumerate(tree):
            yield from _leaves(value, f"{prefix}{index}/")
    else:
        yield prefix.rstrip("/") or "param", tree


def matching_leaves(tree: Any, names: list[str], what: str, prefix: str = "") -> dict[str, Any]:
    """The leaves of `tree` by name, but for None; TensorError where a name is not among `names`."""
    by_name = {}
    for name, leaf in flatten(tree, prefix).items():
        if leaf is None:
            continue
        if name not in names:
            raise TensorError(f"{what} has {name}, which is no parameter: give it the structure of the parameters")
        by_name[name] = leaf
    return by_name
