"""The passes of one step of arrays: moves to the points, and the way back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rulec.array.engine import ArrayEngine
from rulec.errors import RulecError
from rulec.runtime.buckets.scalar_table import Numbers
from rulec.runtime.engine import run
from rulec.runtime.evaluations import move_at, written


class ArrayPasses:
    """The passes of one step. `leaves` are the first gradients by name, `table` the hyper-parameters.

    `values` has gradients of earlier points, copies, for the rules that read them. `closed` after the last pass.
    """

    def __init__(self, engine: ArrayEngine, table: Numbers, leaves: Mapping[str, Any]) -> None:
        self._engine, self.table, self._names = engine, table, [*leaves]
        self._place, self._start = 0, list[Any]()
        self.values: dict[str, Mapping[str, Any]] = {}
        self.closed = False

    def next(self, leaves: Mapping[str, Any], inputs: Mapping[str, Any]) -> bool:
        """Moves the arrays to the next point, by the gradients at the last one; False, and back, after the last."""
        self.check(leaves)
        self.put_back()
        ids, passes = tuple(self._engine.ids[name] for name in leaves), self._engine.passes
        while self._place < passes.count:
            place, self._place = self._place, self._place + 1
            kept = {name: array.copy() for name, array in leaves.items()} if passes.kept[place] else {}
            if self._engine.maximize:
                kept = {name: -array for name, array in kept.items()}
            self.values |= dict.fromkeys(passes.kept[place], kept)
            if self._engine.wants(ids, place, self.table):
                self._move(place, ids, leaves, inputs)
                return True
        self.closed = True
        return False

    def check(self, leaves: Mapping[str, Any]) -> None:
        """RulecError where these are gradients for other arrays than in the first pass."""
        if [*leaves] != self._names:
            raise RulecError("a pass has gradients for other arrays than the first of its step: give all of them again")

    def _move(self, place: int, ids: tuple[int, ...], leaves: Mapping[str, Any], inputs: Mapping[str, Any]) -> None:
        engine = self._engine
        turned = engine.copies_for(self.table)
        with engine.arrays.here(), turned.stepping(leaves):
            arguments = {**inputs, **{key: turned.in_order(kept) for key, kept in self.values.items()}}
            launches = engine.ready_part(ids, turned.in_order(leaves), self.table, move_at(place), False, arguments)
            self._start = [(array, array.copy()) for array in written(engine.tensors[i] for i in ids)]
            run(launches)

    def put_back(self) -> None:
        """Gives the arrays the values of before the step, bit for bit; does nothing where they have them."""
        if self._start:
            with self._engine.arrays.here(), self._engine.copies_for(self.table).stepping(self._names):
                for array, before in self._start:
                    array[...] = before
            self._start = []
