"""The names of states in MLX, whose trees are flat names with dots in a file: no name of a state has a dot."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rulec.backend.printer import unique_name
from rulec.compiler.layout import scale_name
from rulec.language.rule import Rule


def state_names(rules: Iterable[Rule], renamed: Mapping[str, str], parts: Iterable[str]) -> dict[str, str]:
    """State -> name in MLX: `renamed`, else the rule's name as an identifier. `parts` of weights keep their names."""
    taken = set(renamed.values())
    names = dict.fromkeys(name for rule in rules for name in rule.state)
    mlx_names = {name: renamed[name] if name in renamed else unique_name(name, taken) for name in names}
    return mlx_names | {part: part for part in parts}


class Older:
    """The older names of states of composed rules, with dots: `adam.m` for `adam_m`."""

    def __init__(self, names: Mapping[str, str]) -> None:
        dotted = {old: new for old, new in names.items() if "." in old}
        self._names = {**dotted, **{scale_name(old): scale_name(new) for old, new in dotted.items()}}

    def rename(self, state: dict[str, Any]) -> None:
        """Gives entries of a state the names of today, also where `tree_unflatten` made a tree of a name with dots."""
        for old, new in self._names.items():
            for path in ([old], old.split(".")):
                if new not in state and _has(state, path):
                    state[new] = _taken(state, path)


def _has(tree: Any, path: list[str]) -> bool:
    if not path:
        return not isinstance(tree, dict)
    return isinstance(tree, dict) and path[0] in tree and _has(tree[path[0]], path[1:])


def _taken(tree: dict[str, Any], path: list[str]) -> Any:
    """The entry on a path, taken out of its tree with the dicts that it leaves empty."""
    if len(path) == 1:
        return tree.pop(path[0])
    entry = _taken(tree[path[0]], path[1:])
    if not tree[path[0]]:
        del tree[path[0]]
    return entry
