"""The numbers of groups in steps that repeat each other: a schedule changes one of them before every step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rulec.torch.groups.engine import TorchEngine
from rulec.torch.groups.interface import Interface
from rulec.torch.groups.values import NUMBERS, STEADY, Groups, table_of


class GroupNumbers:
    """The values in groups, as their engines have them.

    `doubt` is called before engines take new ones, for who else remembers values.
    """

    def __init__(
        self, groups: Groups, interface: Interface, engines: Sequence[TorchEngine], doubt: Callable[[], None]
    ) -> None:
        self._groups, self._engines, self._doubt = groups, engines, doubt
        self._keys = [[*group] for group in groups]
        self._values = [[*group.values()] for group in groups]
        self._known = frozenset(interface.group_keywords)
        self._numeric = self._known.difference(interface.flag_keywords)
        self._has_sections = interface.sees_sections
        #: How often engines have taken new numbers.
        self.version = 0
        whens = [entry.when.get("weight_decay", "nonzero") for entry in interface.entries]
        #: Whether all rules are alike for any two weight decays but 0.
        self._decays = all(when in ("nonzero", 0) for when in whens)

    def are_steady(self) -> bool:
        """Whether no value under these keys can change while it is the same object."""
        return _are_steady(group[key] for group in self._groups for key in self._known)

    def take(self) -> bool:
        """Takes new values over, as equal numbers may be; False where there are none, or more than numbers is new.

        HyperError where one is out of its range.
        """
        new = self._new()
        if not new:
            return False
        if any(value != self._values[i][place] for i, place, value in new if self._keys[i][place] in self._known):
            self._take_tables()
        for i, place, value in new:
            self._values[i][place] = value
        return True

    def _take_tables(self) -> None:
        self._doubt()
        for engine in self._engines:
            table = table_of(engine.group_rule, [self._groups[i] for i in engine.indices])
            engine.take_table(table)
            engine.table = table
        self.version += 1

    def _new(self) -> list[tuple[int, int, Any]]:
        """The new values by group and place; none where there is another thing to be taken over."""
        new: list[tuple[int, int, Any]] = []
        if len(self._groups) != len(self._keys):
            return new
        for i, (group, keys, values) in enumerate(zip(self._groups, self._keys, self._values, strict=True)):
            now = [*group.values()]
            if len(now) != len(values) or [*group] != keys:
                return []
            for place, (before, value) in enumerate(zip(values, now, strict=True)):
                if before is not value:
                    if not self._may_become(keys[place], before, value):
                        return []
                    new.append((i, place, value))
        return new

    def _may_become(self, key: str, before: Any, value: Any) -> bool:
        """Whether a value may take the place of another under this key, with the same rule and memory."""
        if key not in self._known:
            return key != "params" and not self._has_sections
        if type(before) is tuple and type(value) is tuple:
            return key in self._numeric and len(before) == len(value) and NUMBERS.issuperset(map(type, value))
        if type(before) not in NUMBERS or type(value) not in NUMBERS:
            return False
        return key in self._numeric or (key == "weight_decay" and self._decays and before != 0 != value)


def _are_steady(values: Iterable[Any]) -> bool:
    return all(type(v) in STEADY or (type(v) is tuple and _are_steady(v)) for v in values)
