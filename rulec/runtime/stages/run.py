"""A launch of several stages: kernels, and the values computed before each of them and after the last."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rulec.array_api.pieces import Pieces
from rulec.compiler.ir import Stage, Store
from rulec.runtime.buckets.launch import LARGE, Portion
from rulec.runtime.buckets.plan import VIEWS
from rulec.runtime.buckets.reductions import Joining, Writing
from rulec.runtime.buckets.runtime_launch import Launch
from rulec.runtime.stages.evaluate import Between
from rulec.runtime.stages.kernel_arguments import PortionValues
from rulec.runtime.stages.owner_values import Delegated

Array = np.ndarray[Any, Any]


class Staged:
    """The run of a launch of several stages.

    Where scratch is large and no tensor needs another, tensors are updated portion by portion: each portion uses the
    same scratch memory.
    """

    def __init__(self, launch: Launch) -> None:
        self.launch, self.plan, self.program = launch, launch.version.plan, launch.version.program

    def run(self) -> Joining:
        """Writes all new values and advances the counts. Yields where it needs values of other launches."""
        cut = self.plan.large and not self.launch.version.waits
        for portion in self._portions() if cut else self.launch.part.portions(None):
            yield from self._portion(portion)

    def _portions(self) -> Sequence[Portion]:
        return self.launch.part.portions(LARGE)

    def _portion(self, portion: Portion) -> Joining:
        launch, plan, stages = self.launch, self.plan, self.program.stages
        values = self._values(portion)
        kind = Between if plan.delegations is None else Delegated
        between = kind(plan, values, narrow=launch.version.narrow)
        yield from between.begin()
        last = len(stages) - 1
        for index, stage in enumerate(stages):
            yield from between.work_out(plan.gaps[index])
            self._give(stage, values, between)
            if index < last:
                launch.wrote = launch.wrote or any(s.buffer not in plan.scratch for s in stage.stores)
                yield from between.take(self._kernel(index, values), stage.reduces)
        stays = self._stays(values, between)
        narrow = self._narrow(between, before=True)
        for value in plan.held:
            # Else its owner alone has it, or it is a copy already.
            if value in between.values and not isinstance(between.values[value], Pieces):
                between.values[value] = self._copied(between.values[value])
        if launch.version.waits:
            yield Writing()
        reduced = self._last(values, stays)
        if reduced:
            yield from between.take(reduced, stages[-1].reduces)
        yield from between.work_out(plan.gaps[-1])
        self._write_narrow(portion, stays, narrow + self._narrow(between, before=False))
        self._keep_scalars(portion, stays)
        self._count(portion, stays)

    def _values(self, portion: Portion) -> PortionValues:
        return PortionValues(self.launch, portion)

    def _kernel(self, stage: int, values: PortionValues) -> Mapping[str, Any]:
        """Runs a stage over the portion. Its reductions, by name."""
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
        """The last stage for the tensors at the places `kept`. In a rule with `skip` it reduces nothing."""
        self.launch.wrote = True
        grads = [values.grads[i] for i in kept]
        scratch = {name: [arrays[i] for i in kept] for name, arrays in values.scratch.items()}
        fired = [values.portion.positions[i] for i in kept]
        self.launch.kernel(len(self.program.stages) - 1, values.rows, fired, grads, scratch)

    # Arguments of kernels

    def _give(self, stage: Stage, values: PortionValues, between: Between) -> None:
        """Writes the late columns and the vectors of a stage."""
        for column in stage.columns:
            values.fill(column, between.values[self.program.columns[column].value])
        for name in stage.vectors:
            result = self.program.result(name)
            values.scratch[name] = values.vectors(result, between.values[result.value])

    # New values

    def _stays(self, values: PortionValues, between: Between) -> Any:
        """The truth, for each tensor, that it skips the step; None where no tensor does."""
        if self.program.skip is None:
            return None
        skipped = np.broadcast_to(np.asarray(between.values[self.program.skip]) != 0, (between.count,))
        return skipped if skipped.any() else None

    def _narrow(self, between: Between, before: bool) -> list[tuple[str, Any]]:
        """The new values of numbers and vectors known before the last kernel, or the others, known after it."""
        after = self.plan.after
        early = self.plan.stored_early
        wanted = [s for s in self.program.finish if (s.value not in after) == before and s.buffer not in early]
        return [(s.buffer, self._new_value(s, between)) for s in wanted]

    def _new_value(self, store: Store, between: Between) -> Any:
        """The value of a store: a number for each tensor where a state is an array of each and its value a number."""
        value = between.values[store.value]
        if store.value.op in VIEWS:
            # A new value in the memory of another state must be copied before that state is written.
            value = self._copied(value)
        if between.is_number(store.value) and not self.program.buffer(store.buffer).axes.number:
            return [between.library.at(value, i) for i in range(between.count)]
        return value

    def _copied(self, value: Any) -> Any:
        copy = self.launch.part.bucket.library.copy
        if isinstance(value, Pieces):
            return Pieces(copy(value.flat), value.cuts)
        return [copy(x) for x in value] if isinstance(value, list) else copy(value)

    def _write_narrow(self, portion: Portion, stays: Any, narrow: Sequence[tuple[str, Any]]) -> None:
        states = portion.bucket.states
        kept = range(len(portion)) if stays is None else [int(i) for i in np.flatnonzero(~stays)]
        for buffer, value in narrow:
            if buffer in states[portion.positions[0]]:
                for i in kept:
                    self._write(portion, i, buffer, value[i])
            elif stays is None:
                self.launch.keep_number(buffer, portion.at, value)
            elif kept:
                self.launch.keep_number(buffer, portion.at[kept], np.broadcast_to(value, (len(portion),))[kept])

    def _write(self, portion: Portion, i: int, buffer: str, value: Array) -> None:
        state, new = self._stored_as(portion, i, buffer, value)
        portion.bucket.library.write(state, new)

    @staticmethod
    def _stored_as(portion: Portion, i: int, buffer: str, value: Any) -> tuple[Any, Any]:
        """The state of a tensor, and its new value in the state's shape."""
        tensor, library = portion.tensors[i], portion.bucket.library
        state = portion.bucket.states[portion.positions[i]][buffer]
        shape = tuple(state.shape)
        if tensor.halves is not None and buffer in tensor.shapes:
            return state, library.spread(value, shape)
        letters = portion.bucket.program.buffer(buffer).axes.letters
        return state, library.spread(value, tensor.view.kept_extents(shape, letters)).reshape(shape)

    def _keep_scalars(self, portion: Portion, stays: Any) -> None:
        """Keeps the new states of the scalar program, except for skipped tensors."""
        launch = self.launch
        kept = slice(None) if stays is None else ~stays
        for state, values in launch.scalar_states.items():
            numbers = values if portion.places is None else values[portion.places]
            if stays is None or not stays.all():
                launch.keep_number(state, portion.at[kept], numbers[kept])

    def _count(self, portion: Portion, stays: Any) -> None:
        """One more update of these tensors, except of the skipped ones."""
        counts = portion.bucket.counts
        if stays is None:
            counts.advance(portion.fired if portion.fired is None else portion.at)
            return
        counts.advance(portion.at[~stays])
        self.launch.common.skipped += int(stays.sum())
        self.launch.skipped += [t.name for t, stay in zip(portion.tensors, stays, strict=True) if stay]
