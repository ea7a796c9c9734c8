"""A launch of several stages: kernels, and the values computed before each of them and after the last.

On a device the values between stages stay on the device, and the host does not wait. Then only the device knows the
skipped tensors: every write reads the skip mask. In main memory the last stage leaves skipped tensors out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from rulec.array_api.slices import Pieces, Stacks
from rulec.compiler.ir import Stage, Store
from rulec.language.expr.node import Op
from rulec.language.statistics import PREFIX
from rulec.runtime.buckets.launch import LARGE, Launch, LaunchStatistics, Portion
from rulec.runtime.buckets.plan import VIEWS
from rulec.runtime.buckets.reductions import Joining, Writing
from rulec.runtime.stages.device_arguments import DeviceArguments
from rulec.runtime.stages.evaluate import GapEvaluator
from rulec.runtime.stages.kernel_arguments import KernelArguments
from rulec.runtime.stages.owner_values import OwnerEvaluator
from rulec.runtime.stages.sets import Loaded

Array = np.ndarray[Any, Any]


class StagedRun:
    """The run of a launch of several stages.

    If scratch is large and no tensor needs another, tensors are updated portion by portion: each portion uses the
    same scratch memory.
    """

    def __init__(self, launch: Launch) -> None:
        self.launch, self.plan, self.program = launch, launch.version.plan, launch.version.program
        self.bucket = launch.part.bucket
        self.on_device = self.bucket.capabilities.on_device
        #: The reductions of each stage of a portion.
        self._reduced: list[Mapping[str, Any]] = []

    def run(self) -> Joining:
        """Writes all new values and advances the step counts. Yields where it needs values of other launches."""
        cut = self.plan.large and not self.launch.version.waits
        for portion in self._portions() if cut else self.launch.part.portions(None):
            yield from self._portion(portion)

    def _portions(self) -> Sequence[Portion]:
        """Portions in which matrices of one shape are stacks, where a device has its own products for them."""
        most, part = self.bucket.library.most_stacked, self.launch.part
        value = None if most is None else next((v for v in self.plan.axes if v.op is Op.NEWTON_SCHULZ), None)
        return (
            part.portions(LARGE)
            if value is None
            else part.portions(most, partial(self.bucket.library.stack_size, value))
        )

    def _portion(self, portion: Portion) -> Joining:
        launch, plan, stages = self.launch, self.plan, self.program.stages
        values = (DeviceArguments if self.on_device else KernelArguments)(launch, portion)
        kind = GapEvaluator if plan.owner_plan is None else OwnerEvaluator
        between, self._reduced = kind(plan, values, narrow=launch.version.narrow), []
        yield from between.begin()
        last = len(stages) - 1
        for index, stage in enumerate(stages):
            yield from between.work_out(plan.gaps[index])
            self._give(stage, values, between)
            if index < last:
                launch.wrote = launch.wrote or any(s.buffer not in plan.scratch for s in stage.stores)
                reduced = self._kernel(index, values)
                self._reduced += [reduced]  # written out: a step counts its calls
                if plan.taken[index]:
                    yield from between.take(reduced, plan.taken[index])
        skip_mask = self._skip_mask(values, between)
        narrow = self._narrow(between, before=True)
        for value in plan.held:
            # Else only its owner rank has it, or it is a copy already.
            if value in between.values and not isinstance(between.values[value], Pieces):
                between.values[value] = self._copied(between.values[value])
        if launch.version.waits:
            yield Writing()
        reduced = self._last(values, skip_mask)
        self._reduced += [reduced]
        if reduced and plan.taken[last]:
            yield from between.take(reduced, plan.taken[last])
        yield from between.work_out(plan.gaps[-1])
        narrow += self._narrow(between, before=False)
        if self.program.watch:
            narrow = self._measured(values, between, skip_mask, narrow)
        self._write_narrow(values, skip_mask, narrow)
        self._keep_scalars(portion, skip_mask)
        self._count(portion, skip_mask)

    def _kernel(self, stage: int, values: KernelArguments) -> Mapping[str, Any]:
        """Runs a stage over the portion. Its reductions, by name."""
        return self.launch.kernel(stage, values.rows, values.portion.fired, values.grads, values.scratch)

    def _last(self, values: KernelArguments, skip_mask: Any) -> Mapping[str, Any]:
        """The last stage, for the tensors that do not skip the step."""
        if skip_mask is None or self.on_device:
            self.launch.wrote = True
            return self._kernel(len(self.program.stages) - 1, values)
        if not skip_mask.all():
            self._last_of_some(values, [int(i) for i in np.flatnonzero(~skip_mask)])
        return {}

    def _last_of_some(self, values: KernelArguments, kept: list[int]) -> None:
        """The last stage for the tensors with the indices `kept`. In a rule with `skip` it reduces nothing."""
        self.launch.wrote = True
        grads = [values.grads[i] for i in kept]
        scratch = {name: [arrays[i] for i in kept] for name, arrays in values.scratch.items()}
        fired = [values.portion.positions[i] for i in kept]
        self.launch.kernel(len(self.program.stages) - 1, values.rows, fired, grads, scratch)

    # Arguments of kernels

    def _give(self, stage: Stage, values: KernelArguments, between: GapEvaluator) -> None:
        """Writes the late columns and the vectors of a stage."""
        for column in stage.columns:
            values.fill(column, between.values[self.program.columns[column].value])
        for name in stage.vectors:
            result = self.program.result(name)
            values.scratch[name] = values.vectors(result, between.for_kernels(result.value))

    # New values

    def _skip_mask(self, values: KernelArguments, between: GapEvaluator) -> Any:
        """The skip mask: for each tensor, whether it skips the step; None where no tensor does."""
        if self.program.skip is None:
            return values.rows.stays
        skipped = between.values[self.program.skip]
        if self.on_device:
            return self._skip_mask_on_device(values, skipped)
        skipped = np.broadcast_to(np.asarray(skipped) != 0, (between.count,))
        return skipped if skipped.any() else None

    def _skip_mask_on_device(self, values: KernelArguments, skipped: Any) -> Any:
        """The skip mask on the device; a scaling of gradients may skip tensors too."""
        skip_mask, library = values.rows.stays, values.library
        truth = library.arithmetic[Op.NE](library.cast(skipped, "float64"), library.constant(0.0))
        truth = library.copy(library.spread(truth, (len(values),)))
        # A tensor skipped because its scaled gradients overflowed does not count as skipped by the rule.
        by_rule = truth if skip_mask is None else library.arithmetic[Op.GT](truth, skip_mask)
        self.launch.common.device_skips.note(library.reduce(Op.MAX, library.cast(by_rule, "float64")), library)
        skip_mask = truth if skip_mask is None else library.arithmetic[Op.OR](skip_mask, truth)
        values.rows = replace(values.rows, stays=skip_mask)
        return skip_mask

    def _narrow(self, between: GapEvaluator, before: bool) -> list[tuple[str, Any]]:
        """The new values of numbers and vectors known before the last kernel, or the others, known after it."""
        after = self.plan.after
        early = self.plan.stored_early
        wanted = [s for s in self.plan.finish if (s.value not in after) == before and s.buffer not in early]
        return [(s.buffer, self._new_value(s, between)) for s in wanted]

    def _new_value(self, store: Store, between: GapEvaluator) -> Any:
        """The value of a store: a number for each tensor where a state is an array of each and its value a number."""
        value = between.values[store.value]
        if store.value.op in VIEWS or (store.value.op is Op.RESULT and store.buffer.startswith(PREFIX)):
            # A new value in the memory of another state must be copied before that state is written. The memory of
            # reductions is used again by the next portion.
            value = self._copied(value)
        buffer = self.program.buffer(store.buffer)
        if between.is_number(store.value) and not buffer.axes.number:
            return [between.library.at(value, i) for i in range(between.count)]
        return value

    def _measured(
        self, values: KernelArguments, between: GapEvaluator, skip_mask: Any, narrow: list[tuple[str, Any]]
    ) -> list[tuple[str, Any]]:  # fmt: skip
        """Keeps the statistics, and the operands of those to be asked for, and returns the other values."""
        names, measured = self.plan.measured, {}
        if names:
            measured = {names[buffer]: value for buffer, value in narrow if buffer in names}
            narrow = [(buffer, value) for buffer, value in narrow if buffer not in names]
        left = {}
        for v in self.plan.left:  # written out: a step counts its calls
            left[v] = between.values[v] if v in between.values else values.column(v.arg)  # type: ignore[arg-type]
        known = LaunchStatistics(
            self.launch.version, values.portion.tensors, self.bucket.library, self.launch.common.processes,
            measured, skip_mask, left, [between.reduced, *self._reduced],
        )  # fmt: skip
        self.launch.statistics += [known]
        return narrow

    def _copied(self, value: Any) -> Any:
        copy, split = self.bucket.library.copy, self.bucket.library.split
        if isinstance(value, Loaded):
            return value.copied(copy, split)
        if isinstance(value, Stacks):
            return Stacks([copy(x) for x in value.stacks], value.places, split)
        if isinstance(value, Pieces):
            return Pieces(copy(value.flat), value.cuts)
        return [copy(x) for x in value] if isinstance(value, list) else copy(value)

    def _write_narrow(self, values: KernelArguments, skip_mask: Any, narrow: Sequence[tuple[str, Any]]) -> None:
        """Writes the new values of numbers and vectors: to states of each tensor, or to numbers of all."""
        portion = values.portion
        if narrow and self.launch.transfers is not None:
            self.launch.transfers.bring(self.launch, buffers=[buffer for buffer, _ in narrow])
        library, states = self.bucket.library, self.bucket.states[portion.positions[0]]
        flat = self._write_flat(portion, skip_mask, narrow) if library.flattens else ()
        left_out = skip_mask is not None and not self.on_device
        kept = np.flatnonzero(~skip_mask).tolist() if left_out else range(len(portion))
        writes: dict[Any, tuple[list[Any], list[Any]]] = {}
        for buffer, value in narrow:
            if buffer in flat:
                continue
            if buffer in states:
                for state, new in zip(*self._stored(values, skip_mask, buffer, value, kept), strict=True):
                    into, arrays = writes.setdefault((state.dtype, new.dtype), ([], []))
                    into.append(state)
                    arrays.append(new)
            elif not left_out:
                self.launch.keep_number(buffer, portion.whole or portion.at, value, skip_mask)
            elif kept:
                self.launch.keep_number(buffer, portion.at[kept], np.broadcast_to(value, (len(portion),))[kept])
        for into, arrays in writes.values():
            library.copy_all(into, arrays)

    def _stored(
        self, values: KernelArguments, skip_mask: Any, buffer: str, value: Any, kept: Sequence[int]
    ) -> tuple[list[Any], list[Any]]:
        """The states of the tensors `kept` and their new values: of sets of several tensors, a set at a time."""
        states: list[Any] = []
        new: list[Any] = []
        written: set[int] = set()
        stacked = len(values.sets) < len(values) and isinstance(value, Stacks)
        for places in values.sets if stacked else ():
            stack = value.stack_with(places) if len(places) > 1 else None
            if stack is None:
                continue
            views, parts = values.parts_of_stack(buffer, places, stack, skip_mask)
            states += views
            new += parts
            written |= {*places}
        alone = [self._stored_as(values.portion, i, buffer, value[i], skip_mask) for i in kept if i not in written]
        return states + [state for state, _ in alone], new + [x for _, x in alone]

    def _write_flat(self, portion: Portion, skip_mask: Any, narrow: Sequence[tuple[str, Any]]) -> set[str]:
        """Writes the new values that are flat arrays, for all tensors at once, and returns the names of their states.

        The old values of skipped tensors are written again.
        """
        known, letters = portion.remembered, self.plan.vector_states
        flat = {name: value for name, value in narrow if isinstance(value, Pieces) and name in letters}
        if known is None or not flat:
            return set()
        states, flats = known.states(portion.states, letters), known.flats
        new = {n: x.flat for n, x in flat.items() if n in states.names and x.cuts is flats.cuts(letters[n])}
        if skip_mask is not None:
            old, where = states.read([*new]), self.bucket.library.arithmetic[Op.WHERE]
            new = {n: where(flats.spread(skip_mask, "", letters[n]), old[n].flat, x) for n, x in new.items()}
        states.write(new)
        return {*new}

    def _stored_as(self, portion: Portion, i: int, buffer: str, value: Any, skip_mask: Any) -> tuple[Any, Any]:
        """The state of a tensor, and its new value in the state's shape: the old value where the device skips it."""
        tensor, library = portion.tensors[i], self.bucket.library
        state = self.bucket.states[portion.positions[i]][buffer]
        shape = tuple(state.shape)
        if tensor.shard_layout is not None and buffer in tensor.shapes:
            new = library.spread(value, shape)
        else:
            letters = self.bucket.program.buffer(buffer).axes.letters
            new = library.spread(value, tensor.view.kept_extents(shape, letters)).reshape(shape)
        if skip_mask is not None and self.on_device:
            new = library.arithmetic[Op.WHERE](library.at(skip_mask, i), library.read(state), new)
        return state, new

    def _keep_scalars(self, portion: Portion, skip_mask: Any) -> None:
        """Keeps the new states of the scalar program, except for skipped tensors."""
        bucket, launch = self.bucket, self.launch
        kept = slice(None) if skip_mask is None or bucket.resident else ~skip_mask
        for state, values in launch.scalar_states.items():
            if bucket.resident:
                numbers = values if portion.whole else bucket.library.take(values, portion.at)
                launch.keep_number(state, portion.whole or portion.at, numbers, skip_mask)
            elif skip_mask is None or not skip_mask.all():
                numbers = values if portion.places is None else values[portion.places]
                launch.keep_number(state, portion.at[kept], numbers[kept])

    def _count(self, portion: Portion, skip_mask: Any) -> None:
        """Advances the step counts of these tensors, except of the skipped ones."""
        counts = self.bucket.counts
        if skip_mask is None or self.on_device:
            counts.advance(None if portion.whole else portion.at, skip_mask=skip_mask)
            return
        counts.advance(portion.at[~skip_mask])
        self.launch.common.skipped += int(skip_mask.sum())
        self.launch.skipped += [t.name for t, stay in zip(portion.tensors, skip_mask, strict=True) if stay]
