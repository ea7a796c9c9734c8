"""The vectors of a portion's tensors, one behind the other in one flat array: one operation serves all of them.

A value with rows, columns or matrices, but not rows and columns at once, is the `Pieces` of a flat array, whatever the
shapes of its tensors are. Its axes name its cuts: letters of "bij", in this order, empty for numbers of tensors.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np

from rulec.array_api.library import Library
from rulec.array_api.slices import Cuts, Pieces
from rulec.compiler.ir import Axes, axes_of_letters
from rulec.compiler.view import MatrixView
from rulec.language.expr.node import Node, Op

Whole = np.ndarray[Any, np.dtype[np.int64]]


def axes_in_flat(axes: Axes) -> str | None:
    """The axes of a value in a flat array; None for a value that is not kept so."""
    letters = "".join(letter for letter in "bij" if letter in axes.letters)
    plain = axes == axes_of_letters(axes.letters) and set(axes.letters) <= set("knbij")
    return letters if plain and letters not in ("bij", "ij") else None


#: Operations with rounds: one call computes several independent values of one of them.
ROUNDS = frozenset({Op.ADD, Op.SUB, Op.MUL, Op.DIV, Op.SQRT, Op.RSQRT})

#: Those of them that also have rounds of arrays and one number.
WITH_NUMBERS = frozenset({Op.ADD, Op.MUL})

#: Most elements of one stack: with its temporaries it takes little beside the states of a model.
MOST = 1 << 22


def sets_of(views: Sequence[MatrixView], small: int) -> list[list[int]]:
    """The indices of the tensors in each set: those of one view, of at most `small` elements each, share one."""
    alike: dict[Any, list[int]] = {}
    for i, view in enumerate(views):
        size = math.prod(view.shape)
        stacked = 0 < size <= small and not (view.segments or view.letters or view.blocks)
        alike.setdefault(view if stacked else i, []).append(i)
    cut = ((places, max(1, MOST // max(1, math.prod(views[places[0]].shape)))) for places in alike.values())
    return [places[k : k + most] for places, most in cut for k in range(0, len(places), most)]


class Flats:
    """The cuts of flat arrays of some tensors with these numbers of matrices, rows and columns.

    `library` has indices on its device, where a function keeps them for the next step.
    """

    def __init__(self, extents: Sequence[tuple[int, int, int]], library: Library) -> None:
        self._extents, self._library = extents, library
        self._cuts: dict[str, Cuts] = {}
        self._spreads: dict[tuple[str, str], Any] = {}
        self._ends: dict[tuple[str, str], Any] = {}
        self._runs: dict[tuple[str, str], Any] = {}
        self._dense: dict[tuple[str, bytes], Any] = {}
        self._lasting: dict[tuple[Any, Node], dict[str, Any]] = {}

    def cuts(self, letters: str) -> Cuts:
        """The cuts of values with these axes."""
        if letters not in self._cuts:
            self._cuts[letters] = Cuts.of([_kept(extents, letters) for extents in self._extents])
        return self._cuts[letters]

    # Values with more axes

    def lasting(self, plan: Any, value: Node) -> dict[str, Any]:
        """The flat arrays, by their axes, of a number that a plan has the same of at every step."""
        known = self._lasting.setdefault((plan, value), {})
        self._library.hold(known)
        return known

    def spread(self, values: Any, before: str, after: str) -> Any:
        """A flat array with the axes `before`, each element for all its elements with the axes `after`."""
        if before == after:
            return values
        if (before, after) not in self._spreads:
            places = self._places(before, after)
            same = len(places) == self._count(before) and np.array_equal(places, np.arange(len(places)))
            self._spreads[before, after] = None if same else self._library.numbers(places.astype(np.int32))
        places = self._spreads[before, after]
        self._library.hold(places)
        return values if places is None else self._library.picked(values, places)

    def _count(self, letters: str) -> int:
        return int(self.cuts(letters).sizes.sum())

    def _places(self, before: str, after: str) -> Whole:
        """For each element with the axes `after`, its index in a flat array with the axes `before`."""
        known: dict[tuple[int, int, int], Whole] = {}
        parts = [np.zeros(0, np.int64)]
        for extents, start in zip(self._extents, self.cuts(before).starts.tolist(), strict=True):
            if extents not in known:
                shape = _kept(extents, before)
                places = np.arange(int(np.prod(shape))).reshape(shape)
                known[extents] = np.broadcast_to(places, _kept(extents, after)).reshape(-1)
            parts.append(known[extents] + start)
        return np.concatenate(parts)

    # Values with fewer axes

    def reduced(self, op: Op, values: Pieces, before: str, after: str) -> Any:
        """A flat array reduced to the axes `after`, in float64.

        The order of adding depends on the number of terms alone: the result for a tensor has the same bits whatever
        its neighbours are.
        """
        if self._library.joins_segments:
            ends = self._segment_ends(before, after)
            self._library.hold(ends)
            return self._library.segments(op, self._in_runs(values.flat, before, after), ends)
        axes = tuple(i for i, letter in enumerate("bij") if letter in before and letter not in after)
        reduced = [self._library.reduce(op, x, axes).reshape(-1) for x in values]
        return reduced[0] if len(reduced) == 1 else self._library.join(reduced, 0)

    def _in_runs(self, values: Any, before: str, after: str) -> Any:
        """A flat array in the order of its runs: the elements of one reduction are neighbours."""
        if before.startswith(after):
            return values
        if (before, after) not in self._runs:
            self._runs[before, after] = self._library.numbers(self._order(before, after).astype(np.int32))
        self._library.hold(self._runs[before, after])
        return self._library.picked(values, self._runs[before, after])

    def _order(self, before: str, after: str) -> Whole:
        """The indices of elements, those of one reduction behind one another."""
        last = tuple(axis for axis, letter in enumerate("bij") if letter not in after)
        kept = tuple(axis for axis, letter in enumerate("bij") if letter in after)
        parts = [np.zeros(0, np.int64)]
        cuts = self.cuts(before)
        for shape, start, size in zip(cuts.shapes, cuts.starts.tolist(), cuts.sizes.tolist(), strict=True):
            parts.append(np.arange(start, start + size).reshape(shape).transpose(*kept, *last).reshape(-1))
        return np.concatenate(parts)

    def _segment_ends(self, before: str, after: str) -> Any:
        """The ends of the runs of elements that are reduced to one, after a 0, on the device."""
        if (before, after) not in self._ends:
            terms, results = self.cuts(before).sizes, self.cuts(after).sizes
            lengths = np.repeat(terms // np.maximum(results, 1), results)
            self._ends[before, after] = self._library.numbers(np.concatenate([np.zeros(1, np.int64), lengths.cumsum()]))
        return self._ends[before, after]

    # Arrays of kernels and states

    def taken(self, arrays: Sequence[Any], letters: str) -> Pieces:
        """The results of kernels, one array a tensor, as the pieces of one array without gaps."""
        cuts = self.cuts(letters)
        if not isinstance(arrays, Pieces):
            return Pieces(self._library.join([x.reshape(-1) for x in arrays], 0), cuts)
        if np.array_equal(arrays.cuts.starts, cuts.starts):
            count = self._count(letters)
            return Pieces(arrays.flat if len(arrays.flat) == count else arrays.flat[:count], cuts)
        key = letters, arrays.cuts.starts.tobytes()
        if key not in self._dense:
            places = np.arange(int(cuts.sizes.sum())) + np.repeat(arrays.cuts.starts - cuts.starts, cuts.sizes)
            self._dense[key] = self._library.numbers(places)
        self._library.hold(self._dense[key])
        return Pieces(self._library.picked(arrays.flat, self._dense[key]), cuts)


class FlatStates:
    """States of a portion's tensors in flat arrays of float64, always in the same memory.

    `states` has each tensor's arrays by name; `letters` has the axes of each state.
    """

    def __init__(self, states: Sequence[Mapping[str, Any]], letters: Mapping[str, str], flats: Flats, library: Library):
        self._library = library
        self._arrays = {name: [each[name] for each in states] for name in letters}
        self._addresses = self._places()
        #: The states whose arrays lie in memory as their pieces do.
        self.names = {
            name
            for name, arrays in self._arrays.items()
            if all(x.is_contiguous() and x.is_floating_point() for x in arrays)
            and [x.numel() for x in arrays] == flats.cuts(letters[name]).sizes.tolist()
        }
        self._memory = {
            name: Pieces(library.empty(int(flats.cuts(letters[name]).sizes.sum())), flats.cuts(letters[name]))
            for name in letters
            if name in self.names
        }
        self._flat = {name: [x.reshape(-1) for x in self._arrays[name]] for name in self._memory}
        self._pieces = {name: [x.reshape(-1) for x in memory] for name, memory in self._memory.items()}

    def are_of(self, states: Sequence[Mapping[str, Any]]) -> bool:
        """Whether these are the same arrays still, in the same memory."""
        same = all(
            all(map(operator.is_, map(operator.itemgetter(name), states), arrays))
            for name, arrays in self._arrays.items()
        )
        return same and self._places() == self._addresses

    def _places(self) -> list[int]:
        return [*map(self._library.address, chain.from_iterable(self._arrays.values()))]

    def read(self, names: Sequence[str]) -> dict[str, Pieces]:
        """The values of these states, by name; they stay until the states are written."""
        self._library.hold(self)
        for same in self._alike(names):
            self._library.copy_all(self._all(self._pieces, same), self._all(self._flat, same))
        return {name: self._memory[name] for name in names}

    def write(self, values: Mapping[str, Any]) -> None:
        """Writes flat arrays to states, by name."""
        self._library.hold(self)
        self._library.copy_all([self._memory[name].flat for name in values], [*values.values()])
        for same in self._alike([*values]):
            self._library.copy_all(self._all(self._flat, same), self._all(self._pieces, same))

    def _alike(self, names: Sequence[str]) -> list[list[str]]:
        """The states of each dtype."""
        dtypes: dict[Any, list[str]] = {}
        for name in names:
            dtypes.setdefault(self._arrays[name][0].dtype, []).append(name)
        return [*dtypes.values()]

    @staticmethod
    def _all(arrays: Mapping[str, Sequence[Any]], names: Sequence[str]) -> list[Any]:
        return [x for name in names for x in arrays[name]]


class Remembered:
    """The memory of steps of the same tensors: the cuts of their vectors, states in flat arrays, and views.

    `views` has states and scratch as matrices, by name and index: each array, its address and its view. `stacks` has
    memory for the matrices of a buffer, by its name and dtype and the size of its sets.
    """

    def __init__(self, extents: Sequence[tuple[int, int, int]], library: Library) -> None:
        self.flats, self._library = Flats(extents, library), library
        self.views: dict[tuple[str, int], tuple[Any, int, Any]] = {}
        self.stacks: dict[tuple[str, str, int], Any] = {}
        self._states: dict[tuple[tuple[str, str], ...], FlatStates] = {}
        self._flats: dict[tuple[tuple[int, int, int], ...], Flats] = {}

    def flats_of(self, extents: Sequence[tuple[int, int, int]]) -> Flats:
        """The cuts of matrices with other extents than the parameters."""
        key = tuple(extents)
        if key not in self._flats:
            self._flats[key] = Flats(extents, self._library)
        return self._flats[key]

    def states(self, states: Sequence[Mapping[str, Any]], letters: Mapping[str, str]) -> FlatStates:
        """The memory of each tensor's `states` in flat arrays: `letters` has their axes, by name."""
        key = tuple(letters.items())
        known = self._states.get(key)
        if known is None or not known.are_of(states):
            known = self._states[key] = FlatStates(states, letters, self.flats, self._library)
        return known


#: So many times the tensors of a bucket are in the sets of tensors that it remembers. The portions of a large model are
#: such sets, and have its tensors once.
_TIMES = 4


class Sets:
    """The memory of sets of a bucket's tensors, by their positions: None for all. The oldest are dropped."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, ...] | None, Remembered] = {}

    def of(self, positions: Sequence[int] | None, count: int, make: Callable[[], Remembered]) -> Remembered:
        """The memory of a set, of `count` tensors in all."""
        key = None if positions is None else tuple(positions)
        known = self._known.pop(key, None)
        self._known[key] = known = make() if known is None else known
        while self.size > max(_TIMES * count, len(key or ())):
            del self._known[next(filter(None, self._known))]
        return known

    @property
    def size(self) -> int:
        """The tensors of the sets, except for the set of all."""
        return sum(map(len, filter(None, self._known)))

    def clear(self) -> None:
        """Forgets all sets."""
        self._known.clear()


def _kept(extents: tuple[int, int, int], letters: str) -> tuple[int, int, int]:
    batch, rows, cols = (n if letter in letters else 1 for n, letter in zip(extents, "bij", strict=True))
    return batch, rows, cols
