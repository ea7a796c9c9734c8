"""The numbers and flags of parameter groups, and whether they have changed since the last look."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from operator import itemgetter
from types import NoneType
from typing import Any

Groups = Sequence[Mapping[str, Any]]

#: What cannot become another value while it stays the same object, and what a learning rate is but a tensor.
_STEADY = frozenset({float, int, bool, str, NoneType})


def never_live(value: Any) -> bool:
    """False: a hyper-parameter is read here."""
    return False


class GroupValues:
    """What all groups say under some keywords, and the lists of their parameters.

    `live` says of a value that it may change and yet mean the same: it is read where it is, by who needs it. Where
    there is none of these, None.
    """

    def __init__(self, names: Sequence[str], groups: Groups, live: Callable[[Any], bool] | None = None) -> None:
        self._get = itemgetter("params", *names)
        self._rate = 1 + names.index("lr") if "lr" in names else None
        self._known = [*map(self._get, groups)]
        values = chain.from_iterable([group[name] for group in groups] for name in names)
        self._steady = _steady([*values], live or never_live)
        self._kinds_of = self._rate_types if live is None else _kinds
        self._kinds = self._kinds_of(self._known)
        self.lists: list[list[Any]] = [known[0] for known in self._known]

    def same(self, groups: Groups) -> bool:
        """Whether nothing was changed since these were read; False, too, where looking cannot tell.

        Afterwards `lists` are the groups' lists of parameters now; what is in them is not looked at.
        """
        now = [*map(self._get, groups)]
        self.lists = [values[0] for values in now]
        # A tensor may equal the number, or the other tensor, that it took the place of. What is live is not compared
        # with anything either: that would be waited for.
        return self._steady and self._kinds_of(now) == self._kinds and _equal(now, self._known)

    def _rate_types(self, known: Sequence[Any]) -> list[Any]:
        """The type of each learning rate: the schedulers of torch change tensors in place."""
        return [] if self._rate is None else [type(values[self._rate]) for values in known]


def _kinds(known: Sequence[Any]) -> list[Any]:
    """The type of each value, and of each part of a tuple; the identity of those that no comparison can tell apart."""
    parts = [part for values in known for value in values[1:] for part in (value if type(value) is tuple else (value,))]
    return [type(part) if type(part) in _STEADY else id(part) for part in parts]


def _equal(a: Any, b: Any) -> bool:
    """Whether both are equal; not where that is a question about the elements of tensors or arrays."""
    try:
        return bool(a == b)
    except (RuntimeError, ValueError):
        return False


def _steady(values: Sequence[Any], live: Callable[[Any], bool]) -> bool:
    if _STEADY.issuperset(map(type, values)):
        return True
    others = [value for value in values if type(value) not in _STEADY]
    return all(live(value) or (type(value) is tuple and _steady(value, live)) for value in others)
