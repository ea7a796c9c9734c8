"""Each tensor's row of the scalar table, as in the runtime; every tensor is a group of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from rulec.compiler.ir import Program
from rulec.compiler.scalars import ScalarTable, evaluate_once
from rulec.errors import InternalError
from rulec.testing.interval import Array


class ScalarRows:
    """The scalar program of some tensors, and its states: one for each tensor or group, or one for the model."""

    def __init__(
        self, program: Program, hyper: Sequence[Mapping[str, float]], facts: Sequence[Mapping[str, float]]
    ) -> None:
        self.table, self.hyper, self.facts = ScalarTable(program.scalars), hyper, facts
        self.counts = [0] * len(hyper)
        self._shared = {name: not program.buffer(name).axes.letters for name in self.table.loads}
        self._states: list[dict[str, float]] = [{} for _ in hyper]
        for name in self.table.loads:
            init = program.buffer(name).init
            if init is None:
                raise InternalError(f"state {name} of {program.name} has no initial value")
            for states, values, known in zip(self._states, hyper, facts, strict=True):
                states[name] = float(evaluate_once(init, values, known, {}))

    def advance(self, fired: Sequence[int]) -> Array:
        """Counts an update of the tensors fired. Returns a row of the table for each, in their order."""
        for i in fired:
            self.counts[i] += 1
        table = []
        new: list[tuple[int, dict[str, float]]] = []
        for i in fired:
            levels = {"group": self.counts[i], "model": max(self.counts[j] for j in fired)}
            row, stored = self.table.evaluate(
                (), self.hyper[i], self.counts[i], self.facts[i], self._states[i], levels
            )  # fmt: skip
            table.append(row)
            new.append((i, {k: float(v) for k, v in stored.items()}))
        for i, values in new:
            for name, value in values.items():
                for states in self._states if self._shared.get(name) else self._states[i : i + 1]:
                    states[name] = value
        return np.array(table).reshape(len(table), len(self.table.columns))
