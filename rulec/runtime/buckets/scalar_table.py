"""The scalar table and the step counts of a bucket: one row for each distinct (group, step count) of the fired tensors.

A step count is the number of updates of a tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from copy import copy
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np

from rulec.array_api.library import Library
from rulec.backend.protocol import Rows
from rulec.compiler.ir import Program
from rulec.compiler.scalars import ScalarTable
from rulec.language.expr.node import Op
from rulec.runtime.arrays import Vector

Numbers = np.ndarray[Any, np.dtype[np.float64]]

#: The number of steps evaluated ahead: a dozen NumPy calls serve all of them.
AHEAD = 32


@dataclass(frozen=True)
class Ahead:
    """Rows from the step `first` on, for each step one for each group, with these hyper-parameters."""

    hyper: Mapping[str, Numbers]
    first: int
    table: Numbers

    def has(self, t: int) -> bool:
        """Whether the rows of a step are among them."""
        return 0 <= t - self.first < len(self.table)


class Reading(NamedTuple):
    """Columns with some of the hyper-parameters: `plain` ones, which are one of them, and the table of all `others`."""

    plain: Sequence[tuple[int, str]]
    others: Sequence[int]
    table: ScalarTable


class ScalarRows:
    """Evaluates the scalar program for one bucket.

    `groups` is each tensor's group, `facts` each tensor's shape facts. With scalar states or shape facts of tensors,
    every tensor has a separate row; otherwise tensors of the same group and `t` share one.
    """

    def __init__(self, program: Program, groups: np.ndarray[Any, Any], facts: Sequence[Mapping[str, float]]) -> None:
        self.table = ScalarTable(program.scalars)
        self.groups = np.asarray(groups, np.int64)
        letters = {b.name: b.axes.letters for b in program.buffers}
        self.tensor_states = [b.name for b in program.states if b.axes.letters == "kn"]
        self.group_states = [b.name for b in program.states if b.axes.letters == "k"]
        self.model_states = [b.name for b in program.states if b.axes.letters == ""]
        #: The facts of the dtype, the same for all tensors of a bucket; the others are of each tensor.
        self._constants = {f: facts[0][f] for f in self.table.facts & {"machine_eps"}} if facts else {}
        of_tensors = self.table.facts - self._constants.keys()
        self.row_per_tensor = bool(of_tensors or any(letters[b] == "kn" for b in self.table.loads))
        #: Whether states that are numbers take part in the scalar program.
        self.numbers = bool(self.table.loads or program.scalars.stores)
        self.facts = {f: np.array([x[f] for x in facts]) for f in of_tensors}
        self.slots, self.index = np.unique(self.groups, return_inverse=True)
        self.index = np.ascontiguousarray(self.index, np.int64)
        self._ahead: Ahead | None = None
        self._base: Ahead | None = None
        self._last: Mapping[str, Numbers] = {}
        self._reading: dict[frozenset[str], Reading] = {}

    def shared(self, t: int, hyper: Mapping[str, Numbers]) -> Rows:
        """The rows where `t` is the same for all fired tensors: one for each group.

        `hyper` has one number per group, by name; the same object stands for the same numbers.
        """
        ahead = self._ahead
        if ahead is None or ahead.hyper is not hyper or not ahead.has(t):
            ahead = self._ahead = self._evaluated(t, hyper)
        self._last = hyper
        return Rows(ahead.table[t - ahead.first], self.index)

    def ahead(self, t: int, hyper: Mapping[str, Numbers]) -> Numbers:
        """The rows evaluated ahead, from the step `t` on, for each step one for each group; often there are none."""
        ahead = self._ahead
        if ahead is None or ahead.hyper is not hyper or not ahead.has(t):
            return np.zeros((0, 0, 0))
        return ahead.table[t - ahead.first :]

    def _evaluated(self, t: int, hyper: Mapping[str, Numbers]) -> Ahead:
        """Rows of this step and perhaps of more. Of new numbers only the columns with them are computed.

        Schedules change the learning rate in every step, and powers of `t` take most of the time.
        """
        base = self._base
        if hyper is self._last or base is None or not base.has(t):
            self._base = Ahead(hyper, t, self._values(self.table, t, 1 if base is None else AHEAD, hyper))
            return self._base
        reading = self._columns_reading({k for k, v in hyper.items() if v.tobytes() != base.hyper[k].tobytes()})
        rows = base.table[t - base.first :][:1].copy()
        for column, name in reading.plain:
            rows[..., column] = hyper[name][self.slots]
        if reading.others:
            values = self._values(reading.table, t, 1, hyper)
            for i, column in enumerate(reading.others):  # an index of several columns takes longer than assignments
                rows[..., column] = values[..., i]
        return Ahead(hyper, t, rows)

    def _columns_reading(self, names: Set[str]) -> Reading:
        """The columns with some of the hyper-parameters `names`."""
        key = frozenset(names)
        if key not in self._reading:
            columns = self.table.columns
            reading = [i for i, value in enumerate(columns) if key & ScalarTable.of([value]).hyper]
            plain = [(i, str(columns[i].arg)) for i in reading if columns[i].op in (Op.HYPER, Op.MODEL_HYPER)]
            others = [i for i in reading if i not in dict(plain)]
            self._reading[key] = Reading(plain, others, ScalarTable.of([columns[i] for i in others]))
        return self._reading[key]

    def _values(self, table: ScalarTable, t: int, steps: int, hyper: Mapping[str, Numbers]) -> Numbers:
        counts = np.arange(t, t + steps, dtype=np.float64)[:, None]
        chosen = {k: _narrow(hyper[k][self.slots])[None, :] for k in table.hyper}
        return table.evaluate((steps, self.slots.size), chosen, counts, self._constants, {})[0]

    def separate(
        self, t: Numbers, fired: Numbers | None, hyper: Mapping[str, Numbers], states: Mapping[str, Numbers],
        levels: Mapping[str, Numbers],
    ) -> tuple[Rows, dict[str, Numbers]]:  # fmt: skip
        """The rows for tensors with different `t`, and the new scalar states by name, one number for each fired tensor.

        `fired` are positions in the bucket, None for all of it; `t` has one count for each. `hyper` has one number
        per group. `states` are the scalar states of tensors, groups and the model; `levels` the counts of groups and
        of the model.
        """
        positions = np.arange(self.groups.size) if fired is None else np.asarray(fired, np.int64)
        groups = self.groups[positions]
        if self.row_per_tensor:
            keep, back = np.arange(positions.size), np.arange(positions.size)
        else:
            pairs = np.stack([groups.astype(np.float64), np.asarray(t, np.float64)])
            _, keep, back = np.unique(pairs, axis=1, return_index=True, return_inverse=True)
        at, of = positions[keep], groups[keep]
        chosen = {k: v[of] for k, v in hyper.items()}
        seen = {k: v[at] for k, v in states.items() if k in self.tensor_states}
        seen |= {k: states[k][of] for k in self.group_states if k in states}
        seen |= {k: states[k][0] for k in self.model_states if k in states}
        counts = {k: v[of] if k == "group" else v for k, v in levels.items()}
        facts = {k: v[at] for k, v in self.facts.items()} | self._constants
        table, stored = self.table.evaluate((keep.size,), chosen, np.asarray(t, np.float64)[keep], facts, seen, counts)
        index = np.zeros(self.groups.size, np.int64)
        index[positions] = back.reshape(-1)
        return Rows(table, index), {k: np.broadcast_to(v, (keep.size,))[back.reshape(-1)] for k, v in stored.items()}


def _narrow(values: Numbers) -> Numbers:
    """The same values, as one number where all are equal: scalars are then computed once, not for each group."""
    return values[:1] if (values == values[:1]).all() else values


class Counts:
    """The step counts of a bucket's tensors, with one view for each tensor: users see and change the count through it.

    In main memory nearly all counts are equal. They are compared again only after a user changed them; a comparison of
    bytes finds that faster than any NumPy function. With a `library` they are on its device, and the host does not know
    them.
    """

    def __init__(self, vector: Vector, library: Library | None = None) -> None:
        self.vector, self.library = vector, library
        self._seen: bytes | None = None
        self._common: int | None = None

    @property
    def numbers(self) -> Any:
        """The step counts, live."""
        return self.vector.numbers

    @property
    def views(self) -> Sequence[Any]:
        """Each tensor's step count, in the user's kind of array."""
        return self.vector.views

    def over(self, vector: Vector) -> Self:
        """Step counts of the same kind over another vector."""
        counts = copy(self)
        counts.vector = vector
        return counts

    def held(self) -> Self:
        """A read-only view of the step counts; `advance` is a no-op."""
        counts: Any = copy(self)
        counts.advance = lambda *_, **__: None
        return counts  # type: ignore[no-any-return]

    def common(self, fired: np.ndarray[Any, Any] | None) -> int | None:
        """The step count of all tensors, or of those at the positions `fired`; None where they differ.

        The host does not know step counts on a device.
        """
        numbers = self.vector.numbers
        if fired is not None:
            return _common(numbers[fired])
        seen = numbers.tobytes()
        if seen != self._seen:
            self._seen, self._common = seen, _common(numbers)
        return self._common

    def advance(self, fired: np.ndarray[Any, Any] | None, by: int = 1, skip_mask: Any = None) -> None:
        """One more update, or `by` more, of every tensor, or of those at the positions `fired`.

        On a device, none of the tensors for which `skip_mask` is true.
        """
        numbers, library = self.vector.numbers, self.library
        if library is not None:
            more = by if skip_mask is None else 1 - library.cast(skip_mask, "float32")
            if fired is None:
                numbers += more
            else:
                library.put(numbers, fired, library.take(numbers, fired) + more)
            return
        if fired is not None:
            numbers[fired] += by
            return
        known = self._common if numbers.tobytes() == self._seen else None
        numbers += by
        if known is not None:
            self._seen, self._common = numbers.tobytes(), known + by


def is_count(value: Any) -> bool:
    """Whether this is one whole number from 0 on; text is none."""
    if isinstance(value, str | bytes):
        return False
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError):
        return False
    return number.is_integer() and number >= 0


def _common(numbers: np.ndarray[Any, Any]) -> int | None:
    return int(numbers[0]) if numbers.size and bool((numbers == numbers[0]).all()) else None
