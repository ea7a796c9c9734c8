"""A launch of several stages: kernels, and what is worked out before each of them and after the last."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rulec.compiler.ir import Stage
from rulec.runtime.between import Between
from rulec.runtime.joins import Joining
from rulec.runtime.launch import Launch
from rulec.runtime.part import Portion
from rulec.runtime.plan import VIEWS
from rulec.runtime.portion_values import PortionValues

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
        narrow = self._narrow(between, before=True)
        for value in plan.held:
            between.values[value] = self._copied(between.values[value])
        between.reduced.update(self._last(values, stays))
        yield from between.work_out(plan.gaps[-1])
        self._write_narrow(portion, stays, narrow + self._narrow(between, before=False))
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

    def _narrow(self, between: Between, before: bool) -> list[tuple[str, Any]]:
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
        self.launch.common.skipped += int(stays.sum())
        self.launch.skipped += [t.name for t, stay in zip(portion.tensors, stays, strict=True) if stay]
