"""What groups and the whole model remember: one number each, that advances once in a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rulec.arrays.library import Library
from rulec.arrays.numpy import NumpyLibrary
from rulec.language.node import Op

Whole = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class _Kept:
    """New values at some places of a state, by its own library; `stays` is 1 where the old one remains, or None."""

    places: Whole
    values: Any
    stays: Any


class SharedNumbers:
    """The states kept per group and per model, and how many steps groups and the model have taken.

    `values` has one vector for each state: of one number per group, or of one. A state's vector is of the library that
    it was started with, and so on a device where it follows from what is known there alone; so are the counts once
    `count_by` said so.
    """

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.group_t: Any = np.zeros(0)
        self.model_t: Any = np.zeros(1)
        self._library: dict[str, Library] = {}
        self._counting: Library = NumpyLibrary()
        self._of_groups: set[str] = set()
        self._begun: set[tuple[str, int]] = set()
        self._pending: dict[str, list[_Kept]] = {}

    def make_room(self, groups: int) -> None:
        """Makes room for the counts of this many groups."""
        have = self.group_t
        if groups > len(have):
            self.group_t = self._counting.numbers(np.zeros(groups))
            self.group_t[: len(have)] = have

    def count_by(self, library: Library) -> None:
        """Keeps the counts on a device from now on, where they are not there already."""
        if isinstance(self._counting, NumpyLibrary):
            self._counting = library
            self.group_t, self.model_t = library.numbers(self.group_t), library.numbers(self.model_t)

    def start(self, state: str, of_group: bool, places: Sequence[int], initial: Whole, library: Library) -> None:
        """The first value of a state, which it has since the first of its tensors joined, at these places."""
        if of_group:
            self._of_groups.add(state)
        size = len(self.group_t) if of_group else 1
        have = self.values.get(state, ())
        own = self._library.setdefault(state, library)
        if len(have) < size:
            self.values[state] = own.numbers(np.full(size, initial[0], np.float64))
            if len(have):
                self.values[state][: len(have)] = have
        for place, value in zip(places, initial.tolist(), strict=True):
            if (state, place) not in self._begun:
                self.values[state][place] = value
                self._begun.add((state, place))

    # Steps

    def begin(self) -> None:
        """Opens a step: values advance once in it, however many times tensors fire."""
        self._pending = {}

    def keep(self, state: str, groups: Whole, values: Any, library: Library, stays: Any = None) -> None:
        """Keeps a new value for the groups of some tensors, or for the model, until the end of the step.

        `values` has a number for each of the tensors, those of a group alike, or one for all; `stays` is true of
        tensors that are left as they are: a group's or the model's value is where all of its tensors are.
        """
        level = groups if state in self._of_groups else np.zeros(len(groups), np.int64)
        places, first = np.unique(level, return_index=True)
        values = library.take(library.spread(library.cast(values, "float64"), groups.shape), first)
        own = self._library[state]
        if stays is not None:
            left = library.cast(stays, "float64")
            stays = library.together(
                [library.reduce(Op.MIN, library.take(left, np.flatnonzero(level == place))) for place in places]
            )
            stays = own.numbers(stays)
        self._pending.setdefault(state, []).append(_Kept(places, own.numbers(values), stays))

    @property
    def waiting(self) -> int:
        """How many states have new values that the step has not taken yet."""
        return len(self._pending)

    def end(self) -> None:
        """Closes the step: every state takes its new value, and is counted."""
        counted: dict[int, tuple[_Kept, str]] = {}
        for state, kept in ((state, kept) for state, all_kept in self._pending.items() for kept in all_kept):
            own, values = self._library[state], self.values[state]
            new = kept.values
            if kept.stays is not None:
                new = own.arithmetic[Op.WHERE](kept.stays > 0, own.take(values, kept.places), new)
            own.put(values, kept.places, new)
            if state in self._of_groups:
                counted.update(dict.fromkeys(kept.places.tolist(), (kept, state)))
        for group, (kept, _) in counted.items():
            self._advance(self.group_t, group, kept, int(np.flatnonzero(kept.places == group)[0]))
        if self._pending:
            self._advance(self.model_t, 0, next(reversed(self._pending.values()))[-1], 0)
        self._pending = {}

    def _advance(self, counts: Any, place: int, kept: _Kept, among: int) -> None:
        """One more step of a group or the model, but where everything stays."""
        counts[place] += 1 if kept.stays is None else 1 - self._counting.numbers(kept.stays[among])
