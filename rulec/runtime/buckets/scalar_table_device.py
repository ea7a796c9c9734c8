"""Scalars on a device that the host does not know: hyper-parameters, step counts, and the scalar table from them.

So a captured step can run again with another learning rate, and a skipped step is not counted; the host does not wait
for the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np

from rulec.array_api.library import Library
from rulec.backend.capabilities import DeviceScalars
from rulec.backend.protocol import Scalars
from rulec.compiler.ir import Program
from rulec.compiler.scalars import ScalarTable
from rulec.language.expr.node import Node, Op, walk
from rulec.runtime.arrays import Vector
from rulec.runtime.buckets.shared_scalars import SharedNumbers

Numbers = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Scaling:
    """The scale of gradients, as arrays of one number on the device.

    If `found_inf` is not 0, no tensor is updated.
    """

    found_inf: Any
    scale: Any = None


@dataclass(frozen=True)
class Product:
    """A number on the device: a factor times arrays of one number."""

    factor: float
    arrays: Sequence[Any]


class DeviceHyper:
    """The hyper-parameters `names` of all groups as a table on a device, always in the same memory.

    Live ones are arrays on the device, or products of arrays; the table reads them at every step.
    """

    def __init__(self, names: Sequence[str], library: Library) -> None:
        self.names, self.library = names, library
        self.table: Any = None
        self.live: Mapping[tuple[str, int], Any] = {}
        self._source: Any = None

    def take(self, named: Mapping[str, Numbers], source: Any, live: Mapping[tuple[str, int], Any]) -> None:
        """Writes the live numbers into the table, and the others where `source` is another object than before."""
        if source is not self._source:
            numbers = np.array([named[name] for name in self.names], np.float64)
            numbers = numbers if self.names else np.zeros((0, 1))
            table = self.library.numbers(numbers)
            if self.table is None or tuple(self.table.shape) != numbers.shape:
                self.table = table
            else:
                self.library.write(self.table, table)
            self._source = source
        self.live = {key: value for key, value in live.items() if key[0] in self.names}
        for (name, group), value in self.live.items():
            self.library.write(self.table[self.names.index(name), group], self._number(value))

    def _number(self, value: Any) -> Any:
        if not isinstance(value, Product):
            return self.library.read(value).reshape(())
        numbers = [self.library.cast(self.library.read(array).reshape(()), "float64") for array in value.arrays]
        return reduce(self.library.arithmetic[Op.MUL], numbers, self.library.constant(value.factor))


class DeviceScalarRows:
    """Evaluates the scalar program of one bucket on its device: a row for each tensor.

    `groups` is each tensor's group, `facts` each tensor's shape facts. `by_kernel` is the backend's kernel for
    it; operations of the library compute the scalars where it is None.
    """

    def __init__(
        self, program: Program, groups: np.ndarray[Any, Any], facts: Sequence[Mapping[str, float]], library: Library,
        by_kernel: DeviceScalars | None,
    ) -> None:  # fmt: skip
        self.program, self.library, self._by_kernel = program, library, by_kernel
        self.table = ScalarTable(program.scalars)
        self.groups = library.numbers(np.asarray(groups, np.int64))
        self.facts = {f: library.numbers(np.array([x[f] for x in facts], np.float64)) for f in self.table.facts}
        self.index = np.arange(len(groups), dtype=np.int64)
        self._levels = any(n.op is Op.STEP and n.arg is not None for n in self.table.order)
        self._late = library.numbers(np.zeros((len(program.late), len(groups))))

    def evaluate(
        self, counts: Any, states: Mapping[str, Vector], hyper: Any, shared: SharedNumbers
    ) -> tuple[Any, dict[str, Any]]:
        """The table, with late columns of zeros, and the new values of the scalar states for every tensor.

        It follows from the step counts and the scalar `states` of the bucket's tensors, and the table `hyper`.
        """
        known = Scalars(
            counts, self.groups, hyper, self.facts, self._states(states, shared), {
                "group": self.library.numbers(shared.group_t) + 1, "model": self.library.numbers(shared.model_t) + 1,
            } if self._levels else {},
        )  # fmt: skip
        return self._by_library(known) if self._by_kernel is None else self._by_kernel(known)

    def _states(self, states: Mapping[str, Vector], shared: SharedNumbers) -> dict[str, Any]:
        return {
            name: states[name].numbers if name in states else self.library.numbers(shared.values[name])
            for name in sorted(self.table.loads)
        }

    def _by_library(self, known: Scalars) -> tuple[Any, dict[str, Any]]:
        """The table by operations of the library, for a backend without a kernel for it."""
        library, count = self.library, len(self.index)
        values: dict[Node, Any] = {}
        for part in self.table.order:
            values[part] = self._value(part, values, known)
        columns = [library.spread(library.cast(values[c], "float64"), (count,)) for c in self.table.columns]
        lines = [column.reshape(1, count) for column in columns]
        table = library.stack([*lines, self._late]) if lines else self._late
        stored = {s.buffer: library.spread(values[s.value], (count,)) for s in self.table.stores}
        return library.handed(table.T, "float64", False), stored

    def _value(self, part: Node, values: Mapping[Node, Any], known: Scalars) -> Any:
        if part.op is Op.CONST:
            return self.library.constant(float(part.arg))  # type: ignore[arg-type]
        if part.op in (Op.HYPER, Op.MODEL_HYPER):
            return known.hyper[[*self.program.hyper].index(str(part.arg))][known.groups]
        if part.op is Op.STEP:
            return self._count(part, known)
        if part.op is Op.FACT:
            return known.facts[str(part.arg)]
        if part.op is Op.LOAD:
            return self._state(str(part.arg), known)
        return self.library.arithmetic[part.op](*(values[a] for a in part.args))

    def _count(self, part: Node, known: Scalars) -> Any:
        if part.arg == "group":
            return known.levels["group"][known.groups]
        return known.levels["model"][0] if part.arg == "model" else self.library.cast(known.counts, "float64") + 1

    def _state(self, name: str, known: Scalars) -> Any:
        letters, numbers = self.program.buffer(name).axes.letters, known.states[name]
        return numbers if "n" in letters else numbers[known.groups] if "k" in letters else numbers[0]

    def all_alike(self, truth: Any) -> Any:
        """The truth of a number on the device, that it is not 0, once for each tensor."""
        outcome = self.library.arithmetic[Op.NE](self.library.numbers(truth).reshape(()), self.library.constant(0.0))
        return self.library.copy(self.library.spread(outcome, (len(self.index),)))

    def scale(self, factor: Any) -> Any:
        """The scale of the gradients as kernels read it: float32, shape (); None stays None."""
        if factor is None:
            return None
        return self.library.spread(self.library.cast(self.library.numbers(factor).reshape(()), "float32"), ())


def known_number(value: Node, program: Program, hyper: Mapping[str, float], live: Mapping[Any, Any]) -> Node | None:
    """The expression of a column of constants and hyper-parameters on the host; None for any other column."""
    if value.op is not Op.SCALAR:
        return value if value.op is Op.CONST else None
    column = program.columns[int(value.arg)].value  # type: ignore[call-overload]
    leaves = [n for n in walk([column]) if not n.args]
    names = {name for name, _ in live}
    plain = all(n.op is Op.CONST or (n.op is Op.HYPER and n.arg in hyper and n.arg not in names) for n in leaves)
    return column if plain else None
