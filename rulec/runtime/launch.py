"""One bucket's share of a step: kernels stage by stage, and what is worked out between them."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from rulec.backend.layout import traffic
from rulec.backend.protocol import Rows
from rulec.compiler.ir import Result, Stage
from rulec.errors import BackendUnsupported, PartialUpdate, RuleError
from rulec.language.node import Op
from rulec.runtime.between import Between, Join, Joining, Surroundings, joined
from rulec.runtime.bucket import Bucket, Tensor, Version
from rulec.runtime.debug import LEVEL
from rulec.runtime.rows import Numbers

if TYPE_CHECKING:
    from rulec.runtime.engine import Engine

#: Tensors whose scratch is larger than this many elements together are updated one part after the other.
_LARGE = 1 << 22


@dataclass
class Part:
    """The tensors of one bucket that fire together: worked out once for each set of tensors, used in many steps.

    `positions` are theirs in the bucket, None for all of it in order; `pick` takes their gradients out of those of the
    whole step, None where they are all of it; `check` gives gradients as kernels can read them.
    """

    bucket: Bucket
    positions: list[int] | None
    fired: Any
    pick: Callable[[Sequence[Any]], Sequence[Any]] | None
    check: Callable[[Sequence[Any]], Sequence[Any]]

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that fire."""
        return self.bucket.tensors if self.positions is None else [self.bucket.tensors[i] for i in self.positions]


@dataclass(slots=True)
class Launch:
    """One bucket's share of a step, checked and ready: nothing has been written yet.

    `scalar_states` are the new values of states that follow from hyper-parameters and `t`, for each tensor fired;
    `inputs` has a number, or an array for each tensor fired.
    """

    engine: Engine
    part: Part
    version: Version
    grads: Sequence[Any]
    rows: Rows
    scalar_states: Mapping[str, Numbers]
    inputs: Mapping[str, Any]

    def kernel(
        self, stage: int, rows: Rows, positions: Sequence[int] | None, grads: Sequence[Any], scratch: Any
    ) -> Any:
        """Runs a stage; what it reduced."""
        bucket, call = self.part.bucket, self.version.call
        assert call is not None
        written = call(stage, grads, rows, scratch, tensors=positions)
        if written.params[0] is not bucket.params[0]:
            raise BackendUnsupported(bucket.backend.name, "an update in place of arrays of this kind", self.name)
        return written.reduced

    @property
    def name(self) -> str:
        """The rule's name."""
        return self.version.program.name

    def run(self) -> Joining:
        """Writes everything. Yields where other launches must come as far."""
        bucket, part = self.part.bucket, self.part
        # Counted before the kernel sweeps everything else from the caches; taken back where it fails.
        bucket.counts.advance(part.fired)
        begin = time.perf_counter() if LEVEL else 0.0
        try:
            if not self.version.plan.staged:
                self.kernel(0, self.rows, part.positions, self.grads, None)
            else:
                yield from _Staged(self).run()
        except BaseException:
            bucket.counts.advance(part.fired, -1)
            raise
        if self.scalar_states:
            self._keep_scalars()
        if LEVEL:
            _report(self, time.perf_counter() - begin)

    def _keep_scalars(self) -> None:
        fired = slice(None) if self.part.fired is None else self.part.fired
        for name, values in self.scalar_states.items():
            keep_number(self, name, fired, values)


def keep_number(launch: Launch, name: str, fired: Any, values: Any) -> None:
    """Keeps the new value of a state that is one number: for tensors at once, for groups and the model at the end."""
    bucket, engine = launch.part.bucket, launch.engine
    if name in bucket.scalar_states:
        bucket.scalar_states[name].numbers[fired] = values
        return
    groups = bucket.groups[fired]
    values = np.broadcast_to(np.asarray(values, np.float64), groups.shape)
    at = groups.tolist() if engine.shared[name].size > 1 or "k" in _letters(launch, name) else [0] * len(groups)
    engine.pending.setdefault(name, {}).update(zip(at, values.tolist(), strict=True))


def _letters(launch: Launch, buffer: str) -> str:
    return launch.version.program.buffer(buffer).axes.letters


class _Staged:
    """The run of a launch of several stages.

    Where what is made on the way is large and no tensor needs another, tensors are updated part by part, so that the
    scratch of one is that of the next.
    """

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.engine, self.bucket, self.version = launch.engine, launch.part.bucket, launch.version
        self.program, self.plan = launch.version.program, launch.version.plan
        self.positions = launch.part.positions or list(range(len(self.bucket.tensors)))
        self.written = False

    def run(self) -> Joining:
        self.skipped = np.zeros(len(self.positions), bool)
        try:
            for places in self._portions():
                yield from self._portion(places)
        except Exception as error:
            if self.written:
                names = ", ".join(self.bucket.tensors[i].name for i in self.positions[:5])
                raise PartialUpdate(f"a step failed after some of {names} were updated: {error}") from error
            raise
        self._take_back()

    def _portions(self) -> Iterator[list[int]]:
        """The places of tensors, among those fired, that go through all stages together."""
        if not (self.plan.large and self.plan.alone):
            yield list(range(len(self.positions)))
            return
        portion: list[int] = []
        size = 0
        for place, position in enumerate(self.positions):
            numel = self.bucket.tensors[position].numel
            if portion and size + numel > _LARGE:
                yield portion
                portion, size = [], 0
            portion.append(place)
            size += numel
        yield portion

    def _portion(self, places: list[int]) -> Joining:
        launch, plan, program = self.launch, self.plan, self.program
        whole = len(places) == len(self.positions)
        rows = self._rows(places)
        grads = launch.grads if whole else [launch.grads[i] for i in places]
        scratch = self._scratch(places)
        around = self._surroundings(places, rows, grads, scratch)
        between = Between(plan, around)
        positions = [self.positions[i] for i in places]
        fired: Sequence[int] | None = launch.part.positions if whole else positions
        last = len(program.stages) - 1
        for index, stage in enumerate(program.stages):
            yield from between.work_out(plan.gaps[index])
            self._fill(rows, positions, stage, between)
            scratch |= {n: self._vector(program.result(n), between, positions) for n in stage.vectors}
            if index == last:
                break
            self.written = self.written or any(s.buffer not in self.plan.scratch for s in stage.stores)
            between.reduced.update(launch.kernel(index, rows, fired, grads, scratch))
        stays = self._stays(between)
        if stays is not None:
            self.skipped[places] = stays
            kept = [i for i, stay in enumerate(stays) if not stay]
            fired, grads = [positions[i] for i in kept], [grads[i] for i in kept]
            scratch = {k: [v[i] for i in kept] for k, v in scratch.items()}
        finished = self._finished(between, before=True)
        if grads:
            self.written = True
            reduced = launch.kernel(last, rows, fired, grads, scratch)
            if program.stages[last].reduces:
                between.reduced.update(reduced)
        yield from between.work_out(plan.gaps[-1])
        self._finish(positions, stays, finished + self._finished(between, before=False))

    # What kernels are given

    def _rows(self, places: list[int]) -> Rows:
        """The rows of these tensors: each its own where late columns are to be filled in."""
        rows, program = self.launch.rows, self.program
        if not program.late:
            return rows
        index = np.zeros(len(self.bucket.tensors), np.int64)
        at = np.asarray(self.positions, np.int64)[places]
        index[at] = np.arange(len(places))
        table = np.zeros((len(places), len(program.columns)))
        table[:, : rows.table.shape[1]] = rows.table[rows.index[at]]
        return Rows(table, index)

    def _fill(self, rows: Rows, positions: Sequence[int], stage: Stage, between: Between) -> None:
        for column in stage.columns:
            rows.table[:, column] = between.values[self.program.columns[column].value]

    def _scratch(self, places: list[int]) -> dict[str, Any]:
        """Scratch buffers and inputs of these tensors."""
        params = [self.bucket.params[self.positions[i]] for i in places]
        found: dict[str, Any] = {
            name: [self.engine.scratch((name, i), p, self.version.layout.dtype(name)) for i, p in enumerate(params)]
            for name in self.plan.scratch
        }
        arrays = {k: v for k, v in self.launch.inputs.items() if not isinstance(v, float)}
        return found | {k: [v[i] for i in places] for k, v in arrays.items()}

    def _vector(self, result: Result, between: Between, positions: Sequence[int]) -> list[Any]:
        """A result as kernels read it: contiguous, in the compute dtype, in the order of memory."""
        arrays, compute = self.engine.arrays, self.bucket.layout.compute
        value = between.values[result.value]
        # A view of what the kernel writes must not be read by it at the same time.
        fresh = result.value.op in (Op.LOAD, Op.TRANSPOSE)
        made = []
        for i, position in enumerate(positions):
            view = self.bucket.tensors[position].view
            array = value[i]
            if result.axes.elementwise:
                array = view.tensor(_spread(array, (view.batch, view.rows, view.cols)))
            else:
                rows = 1 if result.axes.rows is None else view.rows
                cols = 1 if result.axes.cols is None else view.cols
                array = _spread(array, (view.batch, rows, cols))
            made.append(arrays.wrapped(np.array(array, compute, order="C", copy=True if fresh else None)))
        return made

    def _surroundings(
        self, places: list[int], rows: Rows, grads: Sequence[Any], scratch: Mapping[str, Any]
    ) -> Surroundings:
        bucket, engine, arrays = self.bucket, self.engine, self.engine.arrays
        positions = [self.positions[i] for i in places]
        groups = bucket.groups[positions]
        compute, inputs = bucket.layout.compute, self.launch.inputs

        def numbers(buffer: str) -> Any:
            if buffer in inputs:
                return np.float64(inputs[buffer])
            if buffer in bucket.scalar_states:
                return bucket.scalar_states[buffer].numbers[positions].astype(np.float64)
            shared = engine.shared[buffer]
            return shared[groups] if "k" in _letters(self.launch, buffer) else shared[0]

        def matrices(buffer: str, i: int) -> Any:
            position = positions[i]
            tensor = bucket.tensors[position]
            if buffer == "g":
                found = arrays.numbers(grads[i])
                found = -found if bucket.layout.maximize else found
            elif buffer == "p":
                found = arrays.numbers(tensor.array)
            elif buffer in scratch:
                found = arrays.numbers(scratch[buffer][i])
            else:
                found = arrays.numbers(bucket.states[position][buffer])
            buffered = self.program.buffer(buffer).axes
            if buffered.elementwise:
                found = tensor.view.matrices(found)
            else:
                found = found.reshape(tensor.view.batch, *found.shape[-2:])
            square = {"i", "j"} <= set(buffered.letters)
            return found.astype(compute if square else np.float64, copy=False)

        table = rows.table if self.program.late else rows.table[rows.index[positions]]
        return Surroundings(
            numbers=numbers, matrices=matrices, table=table,
            groups=groups, hyper=lambda i: {k: v[groups[i]] for k, v in engine.named.items()},
            facts=[bucket.facts[i] for i in positions], tensor_numbers=[bucket.tensors[i].number for i in positions],
            compute=compute, seed=engine.seed, functions=arrays.matrix_functions, owner=engine,
        )  # fmt: skip

    # What is written

    def _stays(self, between: Between) -> Any:
        """Which tensors skip the step; None where none does."""
        if self.program.skip is None:
            return None
        found = np.broadcast_to(np.asarray(between.values[self.program.skip]) != 0, (between.count,))
        return found if found.any() else None

    def _finished(self, between: Between, before: bool) -> list[tuple[str, Any]]:
        """The new values of what is narrower than a parameter, known before the last kernel or after it alone."""
        after = set(self.plan.gaps[-1].values)
        wanted = [s for s in self.program.finish if (s.value not in after) == before]
        # One that is another state's old value must be taken before that is written.
        return [
            (s.buffer, _copied(between.values[s.value]) if s.value.op is Op.LOAD else between.values[s.value])
            for s in wanted
        ]

    def _finish(self, positions: Sequence[int], stays: Any, finished: Sequence[tuple[str, Any]]) -> None:
        kept = [i for i in range(len(positions)) if stays is None or not stays[i]]
        at = np.asarray(positions, np.int64)[kept]
        for buffer, value in finished:
            if buffer in self.bucket.states[positions[0]]:
                for i in kept:
                    self._write(positions[i], buffer, value[i])
            elif kept:
                keep_number(self.launch, buffer, at, np.broadcast_to(np.asarray(value), (len(positions),))[kept])

    def _write(self, position: int, buffer: str, value: Any) -> None:
        state = self.bucket.states[position][buffer]
        batch = self.bucket.tensors[position].view.batch
        shape = tuple(state.shape)
        self.engine.arrays.write(state, np.broadcast_to(value, (batch, *shape[-2:])).reshape(shape))

    def _take_back(self) -> None:
        """Counts and scalar states of what was skipped stay as they were."""
        if not self.skipped.any():
            return
        launch, kept = self.launch, ~self.skipped
        at = np.asarray(self.positions, np.int64)
        self.bucket.counts.advance(at[self.skipped], -1)
        self.engine.skipped += int(self.skipped.sum())
        for name, values in launch.scalar_states.items():
            if kept.any():
                keep_number(launch, name, at[kept], values[kept])
        launch.scalar_states = {}
        names = ", ".join(self.bucket.tensors[i].name for i in at[self.skipped][:3])
        warnings.warn(
            f"{launch.name} skipped the step of {int(self.skipped.sum())} tensors ({names}): its skip was true; their "
            f"parameters, states and counts are as before",
            RuntimeWarning,
            stacklevel=2,
        )


def _spread(array: Any, shape: tuple[int, ...]) -> Any:
    """The array in this shape, itself where it has it: what NumPy broadcasts may not be written."""
    return array if np.shape(array) == shape else np.broadcast_to(array, shape)


def _copied(value: Any) -> Any:
    return [np.array(x) for x in value] if isinstance(value, list) else np.array(value)


def run(launches: Sequence[Launch]) -> None:
    """Writes what is ready, of one engine or several, together where one needs what the others have.

    PartialUpdate where a later launch fails after an earlier one has written.
    """
    joining = [launch for launch in launches if not launch.version.plan.alone]
    done: list[Launch] = []
    try:
        if joining:
            _run_together(joining, done)
        for launch in launches:
            if launch.version.plan.alone:
                for _ in launch.run():
                    raise RuleError(f"{launch.name} needs a value of the whole model that no other tensor has")
                done.append(launch)
    except Exception as error:
        if not done or isinstance(error, PartialUpdate):
            raise
        names = [t.name for earlier in done for t in earlier.part.tensors]
        raise PartialUpdate(
            f"a step failed after {len(names)} tensors were updated ({', '.join(names[:5])}...): {error}"
        ) from error


def _run_together(launches: Sequence[Launch], done: list[Launch]) -> None:
    """Runs launches that share reductions, each from one of these to the next."""
    shared = {tuple((n.op, n.arg) for n in launch.version.program.joins) for launch in launches}
    if len(shared) > 1:
        raise _differ(launches)
    running = [launch.run() for launch in launches]
    waiting: list[Join | None] = [next(steps, None) for steps in running]
    try:
        while any(waiting):
            joins = [join for join in waiting if join is not None]
            if len(joins) < len(waiting) or len({(j.place, j.op, j.level) for j in joins}) > 1:
                raise _differ(launches)
            results = joined(joins)
            waiting = []
            for launch, steps, result in zip(launches, running, results, strict=True):
                try:
                    waiting.append(steps.send(result))
                except StopIteration:
                    waiting.append(None)
                    done.append(launch)
    finally:
        for steps in running:
            steps.close()


def _differ(launches: Sequence[Launch]) -> RuleError:
    return RuleError(
        f"the tensors of {launches[0].name} do not all have the same values across the model: reduce per group and per "
        f"model outside of branches on the shape"
    )


def _report(launch: Launch, seconds: float) -> None:
    bucket = launch.part.bucket
    where = f"{launch.name} by {bucket.backend.name} on {bucket.device}, {bucket.layout.text()}"
    line = f"rulec: {where}: {len(launch.grads)} tensors"
    if LEVEL >= 2:
        moved = sum(t.numel for t in launch.part.tensors) * sum(traffic(launch.version.program, bucket.layout))
        line += f", {seconds * 1e6:.1f} us, {moved / seconds / 1e9:.1f} GB/s"
    print(line, file=sys.stderr)
