"""The numbers of a step's parameter groups, which hold from its backward pass to its end."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from rulec.torch.group_values import Groups


class Frozen:
    """The entries of groups as they were; tensors by identity and version."""

    def __init__(self, groups: Groups) -> None:
        self._entries = _entries(groups)

    def changed(self, groups: Groups) -> str | None:
        """The name of an entry that is another now; None where all are as they were."""
        before, now = self._entries, _entries(groups)
        for (key, old), (same, new) in zip(before, now, strict=False):
            if key != same or not _equal(old, new):
                return key
        return None if len(before) == len(now) else (before + now)[-1][0]


def _entries(groups: Groups) -> list[tuple[str, Any]]:
    return [
        (key, (value, value._version) if isinstance(value, Tensor) else value)
        for group in groups
        for key, value in group.items()
        if key not in ("params", "param_names")
    ]


def _equal(old: Any, new: Any) -> bool:
    if isinstance(old, tuple) and len(old) == 2 and isinstance(old[0], Tensor):
        return isinstance(new, tuple) and old[0] is new[0] and old[1] == new[1]
    if old is new:
        return True
    try:
        return type(old) is type(new) and bool(old == new)
    except (TypeError, ValueError, RuntimeError):  # arrays, and the like: the same only where the same object
        return False
