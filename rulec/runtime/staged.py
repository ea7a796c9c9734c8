"""A launch of several stages: kernels, and what is worked out before each of them and after the last."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from rulec.backend.protocol import Rows
from rulec.compiler.ir import Result, Stage
from rulec.compiler.layout import ITEM_SIZE
from rulec.language.node import Node
from rulec.runtime.between import Between, Joining
from rulec.runtime.launch import Launch
from rulec.runtime.part import Portion
from rulec.runtime.plan import VIEWS
from rulec.runtime.tiled import Tiled
from rulec.runtime.tiles import room_for

Array = np.ndarray[Any, Any]


class Staged:
    """The run of a launch of several stages.

    Where what is made on the way is large and no tensor needs another, tensors are updated portion by portion, so that
    the scratch of one is that of the next.
    """

    def __init__(self, launch: Launch) -> None:
        self.launch, self.plan, self.program = launch, launch.version.plan, launch.version.program

    def run(self) -> Joining:
        """Writes everything and counts it. Yields where others must come as far."""
        for portion in self.launch.part.portions(self.plan.large and self.plan.alone):
            yield from self._portion(portion)

    def _portion(self, portion: Portion) -> Joining:
        launch, plan, stages = self.launch, self.plan, self.program.stages
        values = self._values(portion)
        between = Between(plan, values)
        last = len(stages) - 1
        for index, stage in enumerate(stages):
            yield from between.work_out(plan.gaps[index])
            self._give(stage, values, between)
            if index < last:
                launch.wrote = launch.wrote or any(s.buffer not in plan.scratch for s in stage.stores)
                between.reduced.update(self._kernel(index, values))
        stays = self._stays(values, between)
        finished = self._finished(between, before=True)
        for value in plan.held:
            between.values[value] = self._copied(between.values[value])
        between.reduced.update(self._last(values, stays))
        yield from between.work_out(plan.gaps[-1])
        self._finish(portion, stays, finished + self._finished(between, before=False))
        self._keep_scalars(portion, stays)
        self._count(portion, stays)

    def _values(self, portion: Portion) -> PortionValues:
        return PortionValues(self.launch, portion)

    def _kernel(self, stage: int, values: PortionValues) -> Mapping[str, Any]:
        """Runs a stage over the portion; what it reduced."""
        return self.launch.kernel(stage, values.rows, values.portion.fired, values.grads, values.scratch)

    def _last(self, values: PortionValues, stays: Array | None) -> Mapping[str, Any]:
        """The last stage, for the tensors that do not skip the step."""
        if stays is None:
            self.launch.wrote = True
            return self._kernel(len(self.program.stages) - 1, values)
        if not stays.all():
            self._last_of_some(values, [int(i) for i in np.flatnonzero(~stays)])
        return {}

    def _last_of_some(self, values: PortionValues, kept: list[int]) -> None:
        """The last stage for those tensors alone that do not skip the step; where one may, it reduces nothing."""
        self.launch.wrote = True
        grads = [values.grads[i] for i in kept]
        scratch = {name: [arrays[i] for i in kept] for name, arrays in values.scratch.items()}
        fired = [values.portion.positions[i] for i in kept]
        self.launch.kernel(len(self.program.stages) - 1, values.rows, fired, grads, scratch)

    # What kernels are given

    def _give(self, stage: Stage, values: PortionValues, between: Between) -> None:
        """Fills in the late columns of a stage, and hands its vectors over."""
        for column in stage.columns:
            values.fill(column, between.values[self.program.columns[column].value])
        for name in stage.vectors:
            result = self.program.result(name)
            values.scratch[name] = values.vectors(result, between.values[result.value])

    # What is written

    def _stays(self, values: PortionValues, between: Between) -> Any:
        """Which tensors skip the step; None where none does."""
        if self.program.skip is None:
            return None
        found = np.broadcast_to(np.asarray(between.values[self.program.skip]) != 0, (between.count,))
        return found if found.any() else None

    def _finished(self, between: Between, before: bool) -> list[tuple[str, Any]]:
        """The new values of what is narrower than a parameter, known before the last kernel or after it alone."""
        after = self.plan.after
        early = self.plan.stored_early
        wanted = [s for s in self.program.finish if (s.value not in after) == before and s.buffer not in early]
        # One that is another state's old value must be taken before that is written.
        return [
            (s.buffer, self._copied(between.values[s.value]) if s.value.op in VIEWS else between.values[s.value])
            for s in wanted
        ]

    def _copied(self, value: Any) -> Any:
        copy = self.launch.part.bucket.library.copy
        return [copy(x) for x in value] if isinstance(value, list) else copy(value)

    def _finish(self, portion: Portion, stays: Any, finished: Sequence[tuple[str, Any]]) -> None:
        states = portion.bucket.states
        kept = range(len(portion)) if stays is None else [int(i) for i in np.flatnonzero(~stays)]
        for buffer, value in finished:
            if buffer in states[portion.positions[0]]:
                for i in kept:
                    self._write(portion, i, buffer, value[i])
            elif stays is None:
                self.launch.keep_number(buffer, portion.at, value)
            elif kept:
                self.launch.keep_number(buffer, portion.at[kept], np.broadcast_to(value, (len(portion),))[kept])

    def _write(self, portion: Portion, i: int, buffer: str, value: Array) -> None:
        state, made = self._stored_as(portion, i, buffer, value)
        portion.bucket.library.write(state, made)

    @staticmethod
    def _stored_as(portion: Portion, i: int, buffer: str, value: Any) -> tuple[Any, Any]:
        """The state of a tensor, and its new value in the state's shape."""
        state, view = portion.bucket.states[portion.positions[i]][buffer], portion.tensors[i].view
        shape = tuple(state.shape)
        return state, portion.bucket.library.spread(value, (view.batch, *shape[-2:])).reshape(shape)

    def _keep_scalars(self, portion: Portion, stays: Any) -> None:
        """The states of the scalar program; what was skipped keeps its own."""
        launch = self.launch
        kept = slice(None) if stays is None else ~stays
        for state, values in launch.scalar_states.items():
            own = values if portion.places is None else values[portion.places]
            if stays is None or not stays.all():
                launch.keep_number(state, portion.at[kept], own[kept])

    def _count(self, portion: Portion, stays: Any) -> None:
        """One more update of these tensors, but of those that skipped it."""
        counts = portion.bucket.counts
        if stays is None:
            counts.advance(portion.fired if portion.fired is None else portion.at)
            return
        counts.advance(portion.at[~stays])
        self.launch.engine.skipped += int(stays.sum())
        self.launch.skipped += [t.name for t, stay in zip(portion.tensors, stays, strict=True) if stay]


class PortionValues:
    """Where the values of one portion come from: its tensors, states, gradients, inputs and rows of the table.

    It also holds what its kernels are given: `rows`, `grads` and `scratch`.
    """

    def __init__(self, launch: Launch, portion: Portion) -> None:
        self.launch, self.portion = launch, portion
        self.program, self.layout = launch.version.program, launch.version.layout
        self.compute, self.seed, self.owner = self.layout.compute, launch.engine.seed, launch.engine
        self.library = portion.bucket.library
        self.fill_noise = getattr(portion.bucket.backend, "fill_noise", None)
        self.groups = portion.groups
        self.grads = portion.pick(launch.grads)
        self.rows = self._rows()
        self.scratch: dict[str, Any] = {}
        if launch.inputs or launch.version.plan.scratch:
            self._allot()

    def __len__(self) -> int:
        return len(self.portion)

    def _rows(self) -> Rows:
        """The rows of these tensors, each its own where late columns may differ from tensor to tensor."""
        rows, plan = self.launch.rows, self.launch.version.plan
        if not self.program.late:
            return rows
        one = len(rows.table) == 1 and plan.late_alike
        table = np.zeros((1 if one else len(self.portion), len(self.program.columns)))
        table[:, : rows.table.shape[1]] = rows.table if one else rows.table[rows.index[self.portion.at]]
        return Rows(table, rows.index if one else self.portion.index)

    def _allot(self) -> None:
        """Scratch buffers and inputs."""
        engine, positions = self.launch.engine, self.portion.positions
        # Launches that wait for each other are on the way at the same time.
        owner = self.portion.bucket.device, None if self.launch.version.plan.alone else id(self.launch.version)
        for name in self.launch.version.plan.scratch:
            dtype = self.layout.dtype(name)
            params = [self.portion.bucket.params[i] for i in positions]
            self.scratch[name] = [engine.scratch((name, i, owner), p, dtype) for i, p in enumerate(params)]
        for name, value in self.launch.inputs.items():
            if engine.rule.inputs[name] == "like p":
                self.scratch[name] = self.portion.pick(value)

    def column(self, index: int) -> Any:
        """A column of the scalar table: a number for each tensor, or one where they share a row."""
        table = self.rows.table
        if len(table) == 1:
            return table[0, index]
        return self.library.take(table[:, index], self.rows.index[self.portion.at])

    def known(self, value: Node, found: Any, i: int) -> Any:
        """The number of tensor i, which is known here."""
        return self.library.at(found, i)

    def fill(self, index: int, found: Any) -> None:
        """Takes over a late column."""
        table = self.rows.table
        table[:, index] = np.ravel(found)[0] if len(table) == 1 else found

    def facts(self, i: int) -> Mapping[str, float]:
        """The shape facts of a tensor."""
        return self.portion.bucket.facts[self.portion.positions[i]]

    def hyper(self, i: int) -> Mapping[str, float]:
        """The hyper-parameters of a tensor."""
        group = self.groups[i]
        return {name: values[group] for name, values in self.launch.engine.named.items()}

    def tensor_number(self, i: int) -> int:
        """What tells a tensor's random numbers from others'."""
        return self.portion.tensors[i].number

    def numbers(self, buffer: str) -> Any:
        """The value of a buffer that is a number, for each tensor."""
        bucket, engine = self.portion.bucket, self.launch.engine
        if buffer in self.launch.inputs:
            return np.float64(self.launch.inputs[buffer])
        if buffer in bucket.scalar_states:
            return bucket.scalar_states[buffer].numbers[self.portion.at].astype(np.float64)
        shared = self.library.numbers(engine.shared.values[buffer])
        return shared[self.groups] if "k" in self.program.buffer(buffer).axes.letters else shared[0]

    def matrices(self, buffer: str, i: int) -> Any:
        """A buffer of a tensor as `(batch, rows, cols)`: vectors in float64, matrices in the compute dtype."""
        tensor, axes = self.portion.tensors[i], self.program.buffer(buffer).axes
        found = self._read(buffer, self._stored(buffer, i))
        if axes.elementwise:
            found = tensor.view.matrices(found)
        else:
            found = found.reshape(tensor.view.batch, *found.shape[-2:])
        return self.library.cast(found, self.compute if {"i", "j"} <= set(axes.letters) else "float64")

    def _read(self, buffer: str, array: Any) -> Any:
        """The elements of a buffer, or of a part of it."""
        found = self.library.read(array)
        return -found if buffer == "g" and self.layout.maximize else found

    def extents(self, i: int) -> tuple[int, int, int]:
        """The matrices of tensor i, and their rows and columns."""
        view = self.portion.tensors[i].view
        return view.batch, view.rows, view.cols

    def tiled(self, buffer: str, i: int) -> Tiled:
        """A buffer's matrices, to be read and written tile by tile."""
        stored, view = self._stored(buffer, i), self.portion.tensors[i].view
        if self.program.buffer(buffer).axes.elementwise:
            whole = view.matrices(stored)
        else:
            whole = stored.reshape(view.batch, *stored.shape[-2:])
        if self._copies(buffer):
            return Tiled(whole, self.library, self.compute, partial(self._read, buffer))
        return Tiled(self.library.read(whole), self.library, self.compute, None)

    def _copies(self, buffer: str) -> bool:
        """Whether a buffer is read by copying it."""
        return self.layout.dtype(buffer) != self.compute or (buffer == "g" and self.layout.maximize)

    def writes(self) -> None:
        """Says that states are about to be written."""
        self.launch.wrote = True

    def room(self, i: int) -> int:
        """How many bytes tiles of tensor i may take."""
        numel = self.portion.tensors[i].numel
        return room_for(numel * ITEM_SIZE[self.layout.dtype("g")], self.launch.engine.largest)

    def _stored(self, buffer: str, i: int) -> Any:
        if buffer == "g":
            return self.grads[i]
        if buffer == "p":
            return self.portion.tensors[i].array
        return self.scratch[buffer][i] if buffer in self.scratch else self._states(i)[buffer]

    def _states(self, i: int) -> dict[str, Any]:
        return self.portion.bucket.states[self.portion.positions[i]]

    def vectors(self, result: Result, found: Sequence[Array]) -> list[Any]:
        """A result as kernels read it: contiguous, in the compute dtype, in the order of memory."""
        # A view of what the kernel writes must not be read by it at the same time.
        own = result.value.op in VIEWS
        made = []
        for array, tensor in zip(found, self.portion.tensors, strict=True):
            view = tensor.view
            rows = 1 if result.axes.rows is None else view.rows
            cols = 1 if result.axes.cols is None else view.cols
            if tuple(array.shape) != (shape := (view.batch, rows, cols)):
                array = self.library.spread(array, shape)
            if result.axes.elementwise:
                array = view.tensor(array)
            made.append(self.library.handed(array, self.compute, own))
        return made
