"""States of a group or of the whole model: numbers in the groups' dicts, where users and checkpoints look.

Such a state stands under its own name in each group (`optimizer.param_groups[0]["d"]`), one of the whole model in all
of them alike; beside it stands how many steps the group, or the model, has taken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from rulec.errors import StateMismatch
from rulec.runtime.engine import Engine
from rulec.torch.groups.interface import COUNTS
from rulec.torch.tensors.fake import is_fake


class GroupStates:
    """The numbers of one engine over all groups, in order; `levels` has name -> `group` or `model`."""

    def __init__(self, levels: Mapping[str, str], engine: Engine) -> None:
        self.levels, self.engine = levels, engine
        self._names = [*levels, *(COUNTS[level] for level in dict.fromkeys(levels.values()))]
        self._published: list[Any] = []
        self._views: dict[tuple[int, int], Any] = {}

    def changed(self, groups: Sequence[Mapping[str, Any]]) -> bool:
        """Whether the groups say something else than was published."""
        return bool(self.engine.shared.values) and not _same(self._shown_numbers(groups), self._published)

    def read(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Takes over the groups' numbers; others stay. StateMismatch for what cannot be."""
        if not self.changed(groups):
            return
        for name, level in self.levels.items():
            values = {i: _number(group[name], name) for i, group in enumerate(groups) if name in group}
            for i, value in (values if level == "group" else _agreed(values, name)).items():
                self.engine.shared.values[name][i] = value
        self._read_counts(groups)

    def _read_counts(self, groups: Sequence[Mapping[str, Any]]) -> None:
        for i, group in enumerate(groups):
            if COUNTS["group"] in group:
                self.engine.shared.group_t[i] = _number(group[COUNTS["group"]], COUNTS["group"])
        key = COUNTS["model"]
        for value in _agreed({i: _number(g[key], key) for i, g in enumerate(groups) if key in g}, key).values():
            self.engine.shared.model_t[0] = value

    def publish(self, groups: Sequence[dict[str, Any]]) -> None:
        """Shows the numbers in the groups."""
        shared = self.engine.shared
        if not shared.values:
            return
        for i, group in enumerate(groups):
            for name, level in self.levels.items():
                group[name] = self._shown(shared.values[name], i if level == "group" else 0, float)
            if "group" in self.levels.values():
                group[COUNTS["group"]] = self._shown(shared.group_t, i, int)
            if "model" in self.levels.values():
                group[COUNTS["model"]] = self._shown(shared.model_t, 0, int)
        self._published = self._shown_numbers(groups)

    def _shown(self, numbers: Any, i: int, kind: Callable[[Any], Any]) -> Any:
        """A number as Python's, or, where it is on a device, as a view that is always the same."""
        if not isinstance(numbers, Tensor):
            return kind(numbers[i])
        key = id(numbers), i
        if key not in self._views:
            self._views[key] = numbers[i]
        return self._views[key]

    def _shown_numbers(self, groups: Sequence[Mapping[str, Any]]) -> list[Any]:
        return [group.get(name) for group in groups for name in self._names]


def _same(shown: Sequence[Any], published: Sequence[Any]) -> bool:
    """Whether all are what was published: tensors the same ones, numbers equal."""
    if len(shown) != len(published):
        return False
    pairs = zip(shown, published, strict=True)
    return all(a is b or (not isinstance(a, Tensor) and not isinstance(b, Tensor) and a == b) for a, b in pairs)


def check_complete(levels: Mapping[str, str], groups: Sequence[Mapping[str, Any]]) -> None:
    """StateMismatch where saved groups lack a number that their tensors' states go with."""
    for name, level in levels.items():
        if not any(name in group for group in groups):
            raise StateMismatch(f"the saved groups have no {name}, which is kept per {level}: they are of another rule")


def _number(value: Any, name: str) -> float:
    try:
        return 0.0 if is_fake(value) else float(value)
    except (TypeError, ValueError, RuntimeError):
        raise StateMismatch(f"{name}={value!r} of a group must be a number") from None


def _agreed(values: Mapping[int, float], name: str) -> dict[int, float]:
    """The one value of all groups, at place 0."""
    if len({*values.values()}) > 1:
        listed = ", ".join(f"{v:g}" for v in values.values())
        raise StateMismatch(f"{name} is one number of the whole model, and its groups have {listed}: give all the same")
    return {0: next(iter(values.values()))} if values else {}
