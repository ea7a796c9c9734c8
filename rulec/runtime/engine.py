"""The engine: tensors in buckets, the scalar table, and the loop `for stage: for bucket`.

An adapter adds its tensors, then calls `step`, or `begin`, any number of `fire`, and `finish`. Nothing here knows a
framework: what differs between arrays is behind `Arrays`, what differs between machines behind `Backend`.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rulec.backend import registry
from rulec.backend.layout import ITEM_SIZE, Layout, layout_for, traffic
from rulec.backend.protocol import Call, Kernel, Rows
from rulec.compiler.ir import Program
from rulec.compiler.pipeline import compile
from rulec.compiler.scalars import evaluate_once, resolve_hyper
from rulec.compiler.view import matrix_view
from rulec.errors import BackendUnsupported, PartialUpdate, RuleError, TensorError
from rulec.language.rule import Rule
from rulec.runtime.arrays import Arrays, Vector
from rulec.runtime.counts import Counts
from rulec.runtime.rows import Numbers, RowSource
from rulec.runtime.state import state_specs

_EPS = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}


@dataclass
class Tensor:
    """A parameter as the engine knows it; in no bucket until its first gradient, and without state until then."""

    array: Any
    group: int
    name: str
    numel: int
    bucket: Bucket | None = None
    position: int = 0


@dataclass
class Bucket:
    """Tensors that one kernel updates in one call: of one program, device and layout, whatever their group."""

    program: Program
    layout: Layout
    device: str
    backend: str
    kernel: Kernel
    tensors: list[Tensor] = field(default_factory=list)
    params: list[Any] = field(default_factory=list)
    states: list[dict[str, Any]] = field(default_factory=list)
    counts: Counts = field(default_factory=lambda: Counts(Vector(np.zeros(0), [])))
    scalar_states: dict[str, Vector] = field(default_factory=dict)
    rows: RowSource | None = None
    call: Call | None = None


@dataclass
class _Part:
    """The tensors of one bucket that fire together: worked out once for each set of tensors, used in many steps.

    `positions` are theirs in the bucket, None for all of it in order; `pick` takes their gradients out of those of the
    whole step, None where they are all of it; `check` gives gradients as kernels can read them.
    """

    bucket: Bucket
    positions: list[int] | None
    fired: Any
    pick: Callable[[Sequence[Any]], Sequence[Any]] | None
    check: Callable[[Sequence[Any]], Sequence[Any]]


@dataclass(slots=True)
class Launch:
    """One bucket's share of a step, checked and ready: nothing has been written yet."""

    engine: Engine
    part: _Part
    grads: Sequence[Any]
    rows: Rows
    scalar_states: Mapping[str, Numbers]


class Engine:
    """Runs one rule over any number of tensors.

    `backend` names a backend for all tensors, else each device has its own default. `state_dtype` gives the storage
    dtype of states by name (`""` for all of them); by default a state has its parameter's.
    """

    def __init__(
        self, rule: Rule, arrays: Arrays, backend: str | None = None, state_dtype: Mapping[str, str] | None = None,
        maximize: bool = False,
    ) -> None:  # fmt: skip
        self.rule = rule.standalone()
        self.arrays, self.backend_name, self.maximize = arrays, backend, maximize
        self.state_dtype = dict(state_dtype or {})
        self._check_state_dtypes()
        check_runnable(rule)
        self.tensors: list[Tensor] = []
        self.buckets: dict[Any, Bucket] = {}
        self.hyper_names = list(self.rule.hyper)
        self.shared: dict[str, Numbers] = {}
        self.group_t: Numbers = np.zeros(0)
        self.model_t = 0.0
        self.extensions = 0
        self._hyper: Numbers = np.zeros(0)
        self._named: dict[str, Numbers] = {}
        self._pending: dict[str, dict[int, float]] = {}
        self._plans: dict[tuple[int, ...], list[_Part]] = {}
        self._last: tuple[tuple[int, ...], list[_Part]] = ((), [])

    def _check_state_dtypes(self) -> None:
        from rulec.language.source import did_you_mean

        for state, dtype in self.state_dtype.items():
            if state and state not in self.rule.state:
                raise TensorError(f"{self.rule.name} has no state {state!r}{did_you_mean(state, self.rule.state)}")
            if dtype not in ITEM_SIZE:
                raise TensorError(f"state dtype {dtype!r} is none of {', '.join(ITEM_SIZE)}")

    # Tensors and buckets

    def add(self, array: Any, group: int, name: str) -> int:
        """Adds a parameter and returns its id; its state is allocated when it first gets a gradient."""
        self.arrays.dtype(array)
        self.tensors.append(Tensor(array, group, name, math.prod(self.arrays.shape(array))))
        if group >= self.group_t.size:
            self.group_t = np.concatenate([self.group_t, np.zeros(group + 1 - self.group_t.size)])
        return len(self.tensors) - 1

    def replace(self, tensor_id: int, array: Any) -> None:
        """Another array in the place of a parameter, of the same shape and dtype."""
        tensor = self.tensors[tensor_id]
        tensor.array = array
        if tensor.bucket is not None:
            tensor.bucket.params[tensor.position] = array
            tensor.bucket.call = None
            self._forget_plans()

    def prepare(self, ids: Sequence[int], grad_dtypes: Sequence[str] | None, hyper: Numbers) -> None:
        """Puts tensors in their buckets and allocates their states, where that has not happened yet.

        `grad_dtypes` are the gradients' dtypes; None expects each parameter's own.
        """
        new: dict[Any, list[Tensor]] = {}
        for place, i in enumerate(ids):
            tensor = self.tensors[i]
            if tensor.bucket is None:
                key = self._bucket_key(tensor, grad_dtypes[place] if grad_dtypes else None, hyper)
                new.setdefault(key, []).append(tensor)
        for key, tensors in new.items():
            self._extend(key, tensors, hyper)
        if new:
            self.extensions += 1
            self._forget_plans()

    def _forget_plans(self) -> None:
        self._plans, self._last = {}, ((), [])

    def _bucket_key(self, tensor: Tensor, grad_dtype: str | None, hyper: Numbers) -> Any:
        dtype = self.arrays.dtype(tensor.array)
        view = matrix_view(self.arrays.shape(tensor.array), self.rule.view)
        static = {k: float(hyper[i, tensor.group]) for i, k in enumerate(self.hyper_names) if self.rule.hyper[k].static}
        program = compile(self.rule, {**view.facts, "machine_eps": _EPS[dtype]}, static)
        every = self.state_dtype.get("", dtype)
        states = {b.name: self.state_dtype.get(b.name, every) for b in program.states}
        layout = layout_for(program, dtype, grad_dtype, states, self.maximize)
        return program, layout, self.arrays.device(tensor.array)

    def _extend(self, key: Any, tensors: list[Tensor], hyper: Numbers) -> None:
        bucket = self.buckets.get(key)
        program, layout, device = key
        if bucket is None:
            backend = registry.usable(self.backend_name or self.arrays.backend(device))
            source = backend.emit(program, layout)
            if _DEBUG >= 4:
                print(source, file=sys.stderr)
            bucket = Bucket(program, layout, device, backend.name, backend.build(program, layout, source))
        named = [dict(zip(self.hyper_names, hyper[:, t.group].tolist(), strict=True)) for t in tensors]
        facts = [self._facts(t) for t in tensors]
        params = [t.array for t in tensors]
        states = self.arrays.allocate(params, state_specs(program, layout), named, facts)
        # From here on nothing can fail: the tensors join with their states or not at all.
        for position, tensor in enumerate(tensors, len(bucket.tensors)):
            tensor.bucket, tensor.position = bucket, position
        first = len(bucket.tensors)
        bucket.tensors += tensors
        bucket.params += params
        bucket.states += states
        counted = np.concatenate([bucket.counts.numbers, np.zeros(len(tensors))]).astype(np.int64)
        bucket.counts = Counts(self.arrays.vector(counted))
        self._extend_scalar_states(bucket, first, named, facts)
        bucket.rows = RowSource(
            program, np.array([t.group for t in bucket.tensors]), [self._facts(t) for t in bucket.tensors]
        )
        bucket.call = None
        self.buckets[key] = bucket

    def _extend_scalar_states(
        self, bucket: Bucket, first: int, named: Sequence[Mapping[str, float]], facts: Sequence[Mapping[str, float]]
    ) -> None:
        for buffer in bucket.program.states:
            if buffer.init is None or {"i", "j"} & set(buffer.axes.letters):
                continue
            initial = np.array([float(evaluate_once(buffer.init, h, f, {})) for h, f in zip(named, facts, strict=True)])
            if "n" in buffer.axes.letters:
                old = bucket.scalar_states[buffer.name].numbers if first else np.zeros(0)
                bucket.scalar_states[buffer.name] = self.arrays.vector(np.concatenate([old, initial]))
                continue
            size = self.group_t.size if "k" in buffer.axes.letters else 1
            have = self.shared.get(buffer.name, np.zeros(0))
            self.shared[buffer.name] = np.concatenate([have, np.full(size - have.size, initial[0])])

    def _facts(self, tensor: Tensor) -> dict[str, float]:
        view = matrix_view(self.arrays.shape(tensor.array), self.rule.view)
        return {**view.facts, "machine_eps": _EPS[self.arrays.dtype(tensor.array)]}

    # State, for checkpoints

    def state(self, tensor_id: int) -> dict[str, Any]:
        """The states of a tensor by name, and its step count as `step`; empty before its first gradient."""
        tensor = self.tensors[tensor_id]
        if tensor.bucket is None:
            return {}
        found = {"step": tensor.bucket.counts.views[tensor.position], **tensor.bucket.states[tensor.position]}
        return found | {k: v.views[tensor.position] for k, v in tensor.bucket.scalar_states.items()}

    # Steps

    def hyper_table(self, groups: Sequence[Mapping[str, float]]) -> Numbers:
        """Hyper-parameters by name and group, in float64: what `step` takes."""
        return np.array([[g[k] for g in groups] for k in self.hyper_names], np.float64).reshape(-1, len(groups))

    def check_hyper(self, hyper: Numbers) -> None:
        """HyperError where a value lies outside its range."""
        if hyper.shape[1] == 0:
            return
        # The extremes are in range where all are; a NaN is both.
        for name, low, high in zip(self.hyper_names, hyper.min(axis=1), hyper.max(axis=1), strict=True):
            for value in (float(low), float(high)):
                self.rule.hyper[name].check(name, value, self.rule.name)

    def step(self, ids: tuple[int, ...], grads: Sequence[Any], hyper: Numbers) -> None:
        """One step of these tensors with these gradients. Nothing is written where anything is wrong."""
        self.begin()
        try:
            self.fire(ids, grads, hyper)
        finally:
            self.finish()

    def begin(self) -> None:
        """Opens a step: group- and model-wide values advance once in it, however many times tensors fire."""
        self._pending = {}

    def finish(self) -> None:
        """Closes a step: what groups and the model remember takes its new value."""
        for name, values in self._pending.items():
            for group, value in values.items():
                self.shared[name][group] = value
        touched = {g for values in self._pending.values() for g in values}
        if self._pending:
            self.group_t[list(touched)] += 1
            self.model_t += 1
        self._pending = {}

    def fire(self, ids: tuple[int, ...], grads: Sequence[Any], hyper: Numbers) -> None:
        """Updates these tensors, each once. Everything is checked, for all buckets, before anything is written."""
        run(self.ready(ids, grads, hyper))

    def ready(self, ids: tuple[int, ...], grads: Sequence[Any], hyper: Numbers) -> list[Launch]:
        """What `run` needs to update these tensors; everything is checked and nothing written.

        `hyper` is a table that is not changed afterwards: the same object stands for the same numbers.
        """
        if hyper is not self._hyper:
            self._take(hyper)
        before, parts = self._last
        if before is not ids:
            parts = self._parts(ids, grads)
            self._last = (ids, parts)
        return [self._launch(part, grads if part.pick is None else part.pick(grads)) for part in parts]

    def _take(self, hyper: Numbers) -> None:
        if hyper.shape == self._hyper.shape and hyper.tobytes() == self._hyper.tobytes():
            return
        self.check_hyper(hyper)
        self._hyper = hyper
        self._named = dict(zip(self.hyper_names, hyper, strict=True))

    def _parts(self, ids: tuple[int, ...], grads: Sequence[Any]) -> list[_Part]:
        parts = self._plans.get(ids)
        if parts is None:
            if any(self.tensors[i].bucket is None for i in ids):
                self.prepare(ids, [self.arrays.dtype(g) for g in grads], self._hyper)
            if len(self._plans) >= _PLANS:
                self._plans.clear()
            parts = self._plans[ids] = self._partition(ids)
        return parts

    def _partition(self, ids: Sequence[int]) -> list[_Part]:
        places: dict[int, list[int]] = {}
        for place, i in enumerate(ids):
            places.setdefault(id(self.tensors[i].bucket), []).append(place)
        return [self._part([self.tensors[ids[p]] for p in at], at, len(ids)) for at in places.values()]

    def _part(self, tensors: list[Tensor], places: list[int], total: int) -> _Part:
        bucket = tensors[0].bucket
        assert bucket is not None
        positions = [t.position for t in tensors]
        if len(set(positions)) != len(positions):
            raise TensorError("a tensor is updated twice in one call: give each its whole gradient once")
        dtype, names = bucket.layout.dtype("g"), [t.name for t in tensors]
        check = self.arrays.gradient_check([t.array for t in tensors], dtype, names)
        pick = None if len(places) == total else lambda grads: [grads[i] for i in places]
        if positions == list(range(len(bucket.tensors))):
            return _Part(bucket, None, None, pick, check)
        return _Part(bucket, positions, np.array(positions), pick, check)

    def _launch(self, part: _Part, grads: Sequence[Any]) -> Launch:
        bucket, fired = part.bucket, part.fired
        grads = part.check(grads)
        if bucket.call is None:
            bucket.call = bucket.kernel.bind(bucket.params, bucket.states)
        rows = bucket.rows
        assert rows is not None
        if not (rows.own_rows or bucket.scalar_states or self.shared):
            common = bucket.counts.common(fired)
            if common is not None:
                return Launch(self, part, grads, rows.shared(common + 1, self._named), {})
        t = (bucket.counts.numbers if fired is None else bucket.counts.numbers[fired]) + 1
        states = {k: v.numbers for k, v in bucket.scalar_states.items()} | self.shared
        levels = {"group": self.group_t + 1, "model": np.array(self.model_t + 1)} if self.shared else {}
        return Launch(self, part, grads, *rows.separate(t, fired, self._named, states, levels))

    def run(self, launch: Launch) -> None:
        """Writes one launch of this engine: the kernel's stages, counts and scalar states."""
        bucket, part = launch.part.bucket, launch.part
        call = bucket.call
        assert call is not None
        # Counted before the kernel sweeps everything else from the caches; taken back where it fails.
        bucket.counts.advance(part.fired)
        begin = time.perf_counter() if _DEBUG else 0.0
        try:
            for stage in range(len(bucket.program.stages)):
                written = call(stage, launch.grads, launch.rows, None, tensors=part.positions)
                if written.params[0] is not bucket.params[0]:
                    raise BackendUnsupported(
                        bucket.backend, "an update in place of arrays of this kind", bucket.program.name
                    )
        except BaseException:
            bucket.counts.advance(part.fired, -1)
            raise
        if launch.scalar_states:
            self._keep(launch)
        if _DEBUG:
            _report(launch, time.perf_counter() - begin)

    def _keep(self, launch: Launch) -> None:
        bucket, fired = launch.part.bucket, launch.part.fired
        at = slice(None) if fired is None else fired
        for name, values in launch.scalar_states.items():
            if name in bucket.scalar_states:
                bucket.scalar_states[name].numbers[at] = values
            else:
                groups = bucket.rows.groups[at] if self.shared[name].size > 1 else [0] * len(values)  # type: ignore[union-attr]
                self._pending.setdefault(name, {}).update(zip(map(int, groups), values.tolist(), strict=True))


#: How many sets of tensors that fire together an engine remembers the partition of.
_PLANS = 64


def run(launches: Sequence[Launch]) -> None:
    """Writes what is ready, of one engine or several. PartialUpdate where a later launch fails after an earlier one."""
    for done, launch in enumerate(launches):
        try:
            launch.engine.run(launch)
        except Exception as error:
            if done == 0:
                raise
            names = [name for earlier in launches[:done] for name in _fired_names(earlier.part)]
            raise PartialUpdate(
                f"a step failed after {len(names)} tensors were updated ({', '.join(names[:5])}...): {error}"
            ) from error


def _fired_names(part: _Part) -> list[str]:
    return [t.name for t in _fired(part)]


def _fired(part: _Part) -> list[Tensor]:
    return part.bucket.tensors if part.positions is None else [part.bucket.tensors[i] for i in part.positions]


#: RULEC_DEBUG: 1 names each call's backend and bucket, 2 adds its time and bandwidth, 3 prints each pass as a rule is
#: compiled, 4 the source of each kernel.
_DEBUG = int(os.environ.get("RULEC_DEBUG") or 0)


def _report(launch: Launch, seconds: float) -> None:
    bucket = launch.part.bucket
    where = f"{bucket.program.name} by {bucket.backend} on {bucket.device}, {bucket.layout.text()}"
    line = f"rulec: {where}: {len(launch.grads)} tensors"
    if _DEBUG >= 2:
        moved = sum(t.numel for t in _fired(launch.part)) * sum(traffic(bucket.program, bucket.layout))
        line += f", {seconds * 1e6:.1f} us, {moved / seconds / 1e9:.1f} GB/s"
    print(line, file=sys.stderr)


def check_runnable(rule: Rule) -> None:
    """RuleError for a rule that engines cannot run."""
    if rule.applies_to is not None or rule.skip is not None or rule.inputs:
        raise RuleError(f"{rule.name} routes tensors, skips steps or has inputs, which only the reference runs so far")


def default_hyper(rule: Rule, given: Mapping[str, float], dtype: str = "float32") -> dict[str, float]:
    """Every hyper-parameter of a rule: given, or by default."""
    from rulec.errors import HyperError
    from rulec.language.source import did_you_mean

    rule = rule.standalone()
    for key in given:
        if key not in rule.hyper:
            raise HyperError(f"{rule.name} has no hyper-parameter {key!r}{did_you_mean(key, rule.hyper)}")
    return resolve_hyper(rule.hyper, given, _EPS[dtype], rule.name)
