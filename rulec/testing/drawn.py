"""The data of one step: gradients, scratch, inputs, vectors and rows of the scalar table, drawn for each tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rulec.array.arrays import numpy_dtype
from rulec.backend.protocol import Rows
from rulec.compiler.ir import Program
from rulec.compiler.layout import Layout, kernel_buffers
from rulec.compiler.scalars import ScalarTable, evaluate_once
from rulec.compiler.view import MatrixView
from rulec.errors import InternalError
from rulec.language.expr.node import is_boolean
from rulec.testing.bounds import StageInputs
from rulec.testing.interval import Array
from rulec.testing.judge import flat
from rulec.testing.kinds import ArrayKind


@dataclass
class Drawn:
    """The data of one step besides parameters and states, by tensor.

    `arrays` has the scratch buffers, inputs and vectors as the backend's arrays, `values` the same as NumPy's;
    `columns` has each tensor's row of the scalar table.
    """

    grads: Mapping[int, Array]
    arrays: dict[str, dict[int, Any]] = field(default_factory=dict)
    values: dict[str, dict[int, Array]] = field(default_factory=dict)
    columns: dict[int, Array] = field(default_factory=dict)


@dataclass(frozen=True)
class OnDevice:
    """A step with the scalar table on the device, for a backend that works there.

    Tensors in `stays` are to be left as they are. `scale` is a factor in the gradients; None without one.
    """

    stays: Sequence[int] | None = None
    scale: float | None = None

    @property
    def inverse(self) -> float:
        """The factor of gradients as they are loaded: the reciprocal of `scale`, a float32."""
        return 1.0 if self.scale is None else float(np.float32(1 / np.float64(np.float32(self.scale))))


class Draws:
    """Draws the data of steps over the tensors of one bucket."""

    def __init__(
        self, kind: ArrayKind, program: Program, layout: Layout, views: Sequence[MatrixView], scalars: ScalarRows
    ) -> None:
        self.kind, self.program, self.layout, self.views, self.scalars = kind, program, layout, views, scalars
        wide = kernel_buffers(program)
        #: The buffers passed to each call: scratch and inputs.
        self.passed = [b.name for b in wide if b.role in ("scratch", "input")]
        self._inputs = [b.name for b in wide if b.role == "input"]

    def step(self, fired: Sequence[int], grads: Mapping[int, Array]) -> Drawn:
        """The data of a step with these gradients. It counts an update of the tensors fired.

        Scratch is NaN. A tensor's data depend on its place and its steps alone, not on other tensors.
        """
        dtype = numpy_dtype(self.layout.dtype("g"))
        drawn = Drawn({i: np.asarray(g).astype(dtype) for i, g in grads.items()})
        known = self.scalars.advance(fired)
        for place, i in enumerate(fired):
            random = np.random.default_rng([i, self.scalars.counts[i]])
            late = [_numbers(random, (), is_boolean(c.value)) for c in self.program.late]
            drawn.columns[i] = np.array([*known[place], *late], np.float64)
            for name in self.passed:
                shape = self.views[i].shape
                values = _numbers(random, shape) if name in self._inputs else np.full(shape, np.nan)
                self._pass(drawn, name, i, values.astype(numpy_dtype(self.layout.dtype(name))))
            for vector in self.program.vectors:
                values = _numbers(random, _extents(vector.axes.letters, self.views[i]), is_boolean(vector.value))
                self._pass(drawn, vector.name, i, values.astype(numpy_dtype(self.layout.result(vector.name))))
        return drawn

    def _pass(self, drawn: Drawn, name: str, index: int, values: Array) -> None:
        drawn.arrays.setdefault(name, {})[index] = self.kind.make(values, index % 2)
        drawn.values.setdefault(name, {})[index] = values

    def rows(self, index: int, fired: Sequence[int], drawn: Drawn, on_device: OnDevice | None) -> Rows:
        """The scalar table for stage `index`, in another order than the tensors, behind a row of NaN.

        The row of NaN belongs to tensors that are not fired. Late columns are NaN before the first stage with them.
        """
        known = len(self.program.scalars.columns)
        named = {c for stage in self.program.stages[: index + 1] for c in stage.columns}
        hidden = [c for c in range(known, len(self.program.columns)) if c not in named]
        table = np.full((len(fired) + 1, len(self.program.columns)), np.nan)
        rows = np.zeros(len(self.views), np.int64)
        for place, i in enumerate(fired):
            rows[i] = len(fired) - place
            table[rows[i]] = drawn.columns[i]
        table[:, hidden] = np.nan
        if on_device is None:
            return Rows(table, rows)
        return Rows(self.kind.make(table), rows, self._stays(on_device, rows, len(table)), self._scale(on_device))

    def _stays(self, on_device: OnDevice, rows: Array, count: int) -> Any:
        """For each row, whether its tensor stays as it is: an array on the device, or None."""
        if on_device.stays is None:
            return None
        stays = np.zeros(count, np.bool_)
        stays[rows[list(on_device.stays)]] = True
        return self.kind.make(stays)

    def _scale(self, on_device: OnDevice) -> Any:
        """The factor in the gradients: an array on the device, or None."""
        return None if on_device.scale is None else self.kind.make(np.array([on_device.scale], np.float32))

    def inputs(
        self, index: int, fired: Sequence[int], before: Sequence[Mapping[str, Array]], drawn: Drawn,
        on_device: OnDevice | None,
    ) -> StageInputs:  # fmt: skip
        """The elements of stage `index`, one tensor fired after the other; `before` are their buffers before it."""
        loads = {name: flat([before[i][name] for i in fired]) for name in before[0]}
        loads |= {name: flat([drawn.values[name][i] for i in fired]) for name in self.passed}
        factor = 1.0 if on_device is None else on_device.inverse
        loads["g"] = (-factor if self.layout.maximize else factor) * flat([drawn.grads[i] for i in fired])
        vectors = {
            name: flat([_spread(drawn.values[name][i], self.views[i]) for i in fired])
            for name in self.program.stages[index].reads
        }
        sizes = [drawn.grads[i].size for i in fired]
        columns = np.repeat(np.array([drawn.columns[i] for i in fired]), sizes, axis=0)
        return StageInputs(loads, columns.reshape(sum(sizes), len(self.program.columns)), vectors)


def _numbers(random: np.random.Generator, shape: tuple[int, ...], truth: bool = False) -> Array:
    """Numbers of ordinary size, or truth values as 0 and 1."""
    if truth:
        return np.asarray(random.random(shape) < 0.5, np.float64)
    return np.asarray(random.uniform(0.25, 2, shape) * np.where(random.random(shape) < 0.25, -1.0, 1.0))


def _extents(letters: str, view: MatrixView) -> tuple[int, ...]:
    """The shape of a vector: the parameter's for a vector of all axes, else `(batch, rows, cols)` with 1 for others."""
    if {"b", "i", "j"} <= set(letters):
        return view.shape
    sizes = {"b": view.batch, "i": view.rows, "j": view.cols}
    return tuple(sizes[c] if c in letters else 1 for c in "bij")


def _spread(vector: Array, view: MatrixView) -> Array:
    """A vector's value for each element of the parameter."""
    if vector.shape == view.shape:
        return vector
    return view.tensor(np.broadcast_to(vector, (view.batch, view.rows, view.cols)))


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
