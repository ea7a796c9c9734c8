"""States of groups and of the whole model: one number each, updated once in a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rulec.array_api.library import Library
from rulec.array_api.numpy import NumpyLibrary
from rulec.language.expr.node import Op
from rulec.runtime.keyed import COUNTS

Whole = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class _Kept:
    """New values for some indices of a state, in its library. `skip_mask` is 1 where the old value remains, or None."""

    places: Whole
    values: Any
    skip_mask: Any


class SharedNumbers:
    """The states of groups and the model, and the step counts of groups and the model.

    `values` has one vector for each state: one number per group, or one number. A vector belongs to the library of
    `start`, and lies on a device where it follows from values known only there. After `count_by`, so do the counts.
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
        self._passed: set[int] = set()
        self._stepped = False

    @property
    def states(self) -> dict[str, Any]:
        """The states, and the step counts of groups and of the model where these have states."""
        counts = {"group": self.group_t, "model": self.model_t}
        levels = {"group" if name in self._of_groups else "model" for name in self.values}
        return self.values | {COUNTS[level]: counts[level] for level in levels}

    def make_room(self, groups: int) -> None:
        """Extends the step counts to this many groups."""
        have = self.group_t
        if groups > len(have):
            self.group_t = self._counting.numbers(np.zeros(groups))
            self.group_t[: len(have)] = have

    def count_by(self, library: Library) -> None:
        """Moves the step counts to the library's device, unless they are on a device already."""
        if isinstance(self._counting, NumpyLibrary):
            self._counting = library
            self.group_t, self.model_t = library.numbers(self.group_t), library.numbers(self.model_t)

    def start(self, state: str, of_group: bool, places: Sequence[int], initial: Whole, library: Library) -> None:
        """Writes the first value of a state with these indices, where no tensor has started it yet."""
        if of_group:
            self._of_groups.add(state)
        size = len(self.group_t) if of_group else 1
        have = self.values.get(state, ())
        state_library = self._library.setdefault(state, library)
        if len(have) < size:
            self.values[state] = state_library.numbers(np.full(size, initial[0], np.float64))
            if len(have):
                self.values[state][: len(have)] = have
        for place, value in zip(places, initial.tolist(), strict=True):
            if (state, place) not in self._begun:
                self.values[state][place] = value
                self._begun.add((state, place))

    # Steps

    def begin(self) -> None:
        """Opens a step: each state takes one new value in it, for any number of launches."""
        self._pending, self._passed, self._stepped = {}, set(), False

    def keep(self, state: str, groups: Whole, values: Any, library: Library, skip_mask: Any = None) -> None:
        """Keeps a new value for the groups of some tensors, or for the model, until the end of the step.

        `values` has one number for each tensor, equal within a group, or one for all. `skip_mask` is true for tensors
        that stay as they are. The value of a group or the model stays where all of its tensors do.
        """
        level = groups if state in self._of_groups else np.zeros(len(groups), np.int64)
        places, first = np.unique(level, return_index=True)
        values = library.take(library.spread(library.cast(values, "float64"), groups.shape), first)
        state_library = self._library[state]
        if skip_mask is not None:
            left = library.cast(skip_mask, "float64")
            skip_mask = library.together(
                [library.reduce(Op.MIN, library.take(left, np.flatnonzero(level == place))) for place in places]
            )
            skip_mask = state_library.numbers(skip_mask)
        self._pending.setdefault(state, []).append(_Kept(places, state_library.numbers(values), skip_mask))

    def count(self, states: Sequence[str], groups: Whole) -> None:
        """Counts this step for the model, and for these groups where they have states, though the values stay."""
        self._stepped = True
        if not self._of_groups.isdisjoint(states):
            self._passed.update(groups.tolist())

    @property
    def waiting(self) -> int:
        """The number of states with new values not yet written."""
        return len(self._pending)

    def end(self) -> None:
        """Closes the step: writes the new value of every state, and advances the step counts."""
        counted: dict[int, tuple[_Kept, str]] = {}
        for state, kept in ((state, kept) for state, all_kept in self._pending.items() for kept in all_kept):
            library, values = self._library[state], self.values[state]
            new = kept.values
            if kept.skip_mask is not None:
                new = library.arithmetic[Op.WHERE](kept.skip_mask > 0, library.take(values, kept.places), new)
            library.put(values, kept.places, new)
            if state in self._of_groups:
                counted.update(dict.fromkeys(kept.places.tolist(), (kept, state)))
        for group, (kept, _) in counted.items():
            self._advance(self.group_t, group, kept, int(np.flatnonzero(kept.places == group)[0]))
        kept_last = [all_kept[-1] for all_kept in self._pending.values() if all_kept]  # an interrupt leaves one empty
        if kept_last:
            self._advance(self.model_t, 0, kept_last[-1], 0)
        for counts, places in ((self.group_t, self._passed - counted.keys()), (self.model_t, self._alone())):
            for place in places:
                counts[place] += 1
        self.begin()

    def _alone(self) -> set[int]:
        """The index of the model's step count where only `count` advances it."""
        return {0} if self._stepped and not self._pending else set()

    def _advance(self, counts: Any, place: int, kept: _Kept, among: int) -> None:
        """One more step of a group or the model, unless all its tensors stay."""
        counts[place] += 1 if kept.skip_mask is None else 1 - self._counting.numbers(kept.skip_mask[among])
