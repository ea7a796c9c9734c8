"""The engine: tensors in buckets, hyper-parameters, and steps.

An adapter adds its tensors, then calls `step`, or `begin`, any number of `fire`, and `finish`. Nothing here knows a
framework: what differs between arrays is behind `Arrays`, what differs between machines behind `Backend`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from rulec.backend import registry
from rulec.backend.protocol import Backend, Rows
from rulec.compiler.ir import Program
from rulec.compiler.layout import ITEM_SIZE, is_shaped, is_viewed, layout_for
from rulec.compiler.lower import check_counts
from rulec.compiler.pipeline import compile
from rulec.compiler.routing import Router
from rulec.compiler.scalars import ScalarTable, evaluate_once, resolve_hyper
from rulec.compiler.view import matrix_view
from rulec.errors import HyperError, RuleError, TensorError
from rulec.language.node import Op, walk
from rulec.language.rule import Rule, assignments
from rulec.language.seed import checked_seed
from rulec.language.source import did_you_mean
from rulec.runtime.arrays import Arrays
from rulec.runtime.bucket import Bucket, Tensor, Version
from rulec.runtime.counts import Counts, DeviceCounts
from rulec.runtime.device import DeviceRows, DeviceTables, Scaling
from rulec.runtime.launch import Launch
from rulec.runtime.library import Library
from rulec.runtime.part import Part
from rulec.runtime.plan import needs_matrix
from rulec.runtime.rows import Numbers, RowSource
from rulec.runtime.shared import SharedNumbers
from rulec.runtime.skips import SkippedThere
from rulec.runtime.state import state_specs
from rulec.runtime.step import run

__all__ = ["Engine", "Launch", "default_hyper", "run"]

EPS = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}

#: How many sets of tensors that fire together an engine remembers the partition of.
_PLANS = 1024


class Across(Protocol):
    """Other processes, that have other tensors."""

    def total(self, op: Op, numbers: Any) -> Any:
        """The numbers of all processes, reduced one by one; the same in all."""
        ...


class Engine:
    """Runs one rule over any number of tensors.

    `backend` is a backend for all tensors, or its name, else each device has its own default. `state_dtype` gives the
    storage dtype of states by name (`""` for all of them); by default a state has its parameter's. `seed` is that of
    the rule's random numbers.

    Where `resident`, tensors on a device have their step counts and scalars there too, so that a step can be captured
    and run again: `live` then gives the hyper-parameters that are read from an array on the device at every step, by
    name and group.
    """

    def __init__(
        self, rule: Rule, arrays: Arrays, backend: str | Backend | None = None,
        state_dtype: Mapping[str, str] | None = None, maximize: bool = False, seed: int = 0, resident: bool = False,
    ) -> None:  # fmt: skip
        self.rule = rule.standalone()
        self.arrays, self.backend_name, self.maximize, self.seed = arrays, backend, maximize, checked_seed(seed)
        self.state_dtype = dict(state_dtype or {})
        self.resident = resident
        #: What takes part in reductions over groups and the model beside this process; which group of all is which
        #: here, and how many there are.
        self.across: Across | None = None
        self.places: Sequence[int] = ()
        self.group_count = 0
        self.live: dict[tuple[str, int], Any] = {}
        self.host = arrays.library("cpu", False)
        self._device_hyper = DeviceTables()
        self._router = Router(self.rule)
        self._check_state_dtypes()
        _check_shared(self._router.rules)
        self.hyper = self.rule.all_hyper
        self.hyper_names = list(self.hyper)
        self.tensors: list[Tensor] = []
        self.buckets: dict[Any, Bucket] = {}
        self.shared = SharedNumbers()
        #: The bytes of the largest parameter, as its gradient has them.
        self.largest = 0
        self.extensions = 0
        #: How many updates of tensors were skipped so far, by the rule's own condition, as far as the host knows.
        self.skipped = 0
        self.skipped_there = SkippedThere()
        self.named: dict[str, Numbers] = {}
        self._hyper: Numbers = np.zeros(0)
        self._model_hyper: set[str] = set()
        self._plans: dict[tuple[int, ...], list[Part]] = {}
        self._last: tuple[tuple[int, ...], list[Part]] = ((), [])
        self._scratch: dict[Any, Any] = {}
        self._ways: dict[Any, Rule | None] = {}
        self._within: dict[Any, Bucket] = {}

    def _check_state_dtypes(self) -> None:
        known = self._router.states
        for state, dtype in self.state_dtype.items():
            if state and state not in known:
                raise TensorError(f"{self.rule.name} has no state {state!r}{did_you_mean(state, known)}")
            if dtype not in ITEM_SIZE:
                raise TensorError(f"state dtype {dtype!r} is none of {', '.join(ITEM_SIZE)}")

    # Tensors and buckets

    def add(
        self, array: Any, group: int, name: str, tags: frozenset[str] = frozenset(), number: int | None = None,
        maximize: bool | None = None,
    ) -> int:  # fmt: skip
        """Adds a parameter and returns its id; its state is allocated when it first gets a gradient.

        `tags` are its words for `tagged(...)`; `number`, its id by default, tells its random numbers from others';
        `maximize` is the engine's by default. RuleError where the rule does not apply to it and names no other.
        """
        dtype = self.arrays.dtype(array)
        shape = self.arrays.shape(array)
        rule = self._router.choose(shape, tags, name)
        number = len(self.tensors) if number is None else number
        maximize = self.maximize if maximize is None else maximize
        self.largest = max(self.largest, math.prod(shape) * ITEM_SIZE[dtype])
        self.tensors.append(Tensor(array, group, name, rule, matrix_view(shape, rule.view), number, maximize))
        self.shared.make_room(group + 1)
        return len(self.tensors) - 1

    def replace(self, tensor_id: int, array: Any) -> None:
        """Another array in the place of a parameter, of the same shape and dtype."""
        tensor = self.tensors[tensor_id]
        tensor.array = array
        if tensor.bucket is not None:
            tensor.bucket.params[tensor.position] = array
            tensor.bucket.rebind()
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
        for key in new:
            self._model_hyper |= _model_hyper(key[0])
        self._check_model_hyper(hyper)
        for join in [self._extension(key, tensors, hyper) for key, tensors in new.items()]:
            join()
        if new:
            self.extensions += 1
            self._forget_plans()

    def _forget_plans(self) -> None:
        self._plans, self._last, self._within = {}, ((), []), {}

    def needs_copy(self, tensor_id: int, hyper: Numbers) -> bool:
        """Whether a parameter lies in memory in another order than its shape's, and its rule looks at its matrices.

        `prepare` refuses it then: a contiguous copy must take its place.
        """
        tensor = self.tensors[tensor_id]
        return not self.arrays.plain(tensor.array) and is_viewed(self._program(tensor, hyper)[0])

    def _program(self, tensor: Tensor, hyper: Numbers) -> tuple[Program, dict[str, float]]:
        """The program of a tensor's rule for its shape, and the static hyper-parameters that it was made for."""
        named = self._named_of(tensor, hyper)
        static = {k: named[k] for k, h in tensor.rule.hyper.items() if h.static}
        return compile(tensor.rule, self._facts(tensor), static), static

    def _bucket_key(self, tensor: Tensor, grad_dtype: str | None, hyper: Numbers) -> Any:
        dtype = self.arrays.dtype(tensor.array)
        program, static = self._program(tensor, hyper)
        check_counts(program, {**self._facts(tensor), **static})
        self._check_fits(program, tensor)
        every = self.state_dtype.get("", dtype)
        states = {b.name: self.state_dtype.get(b.name, every) for b in program.states}
        turned = tensor.view.transposed and is_shaped(program)
        layout = layout_for(program, dtype, grad_dtype, states, tensor.maximize, turned)
        return program, layout, self.arrays.device(tensor.array), tuple(sorted(static.items()))

    def _check_fits(self, program: Program, tensor: Tensor) -> None:
        function = needs_matrix(program)
        if function and len(tensor.view.shape) < 2:
            raise RuleError(
                f"{function} needs a matrix, and {tensor.name} has {len(tensor.view.shape)} dimensions: give "
                f"{tensor.rule.name} applies_to: ndim >= 2 and a rule for the others under otherwise"
            )
        if is_viewed(program) and not self.arrays.plain(tensor.array):
            raise TensorError(
                f"{tensor.name} does not lie in memory in the order of its shape, as the rows and columns of "
                f"{tensor.rule.name} need: pass it contiguous"
            )

    def _extension(self, key: Any, tensors: list[Tensor], hyper: Numbers) -> Callable[[], None]:
        """What lets tensors join a bucket, with their states: all that may fail has been done."""
        program, layout, device, static = key
        bucket = self.buckets.get(key)
        if bucket is None:
            backend = registry.usable(self.backend_name or self.arrays.backend(device))
            there = getattr(backend, "on_device", False)
            # Whether a step is skipped is known on the device alone, and so is then how often there was one.
            resident = there and (self.resident or program.skip is not None)
            library = self.arrays.library(device, there)
            bucket = Bucket(program, layout, device, backend, dict(static), library, resident)
            if resident or not program.predicates:
                bucket.made()
        named = [self._named_of(t, hyper) for t in tensors]
        facts = [self._facts(t) for t in tensors]
        params = [t.array for t in tensors]
        specs = state_specs(program, layout)
        shapes = [[s.shape(t.view, h, f) for s in specs] for t, h, f in zip(tensors, named, facts, strict=True)]
        states = self.arrays.allocate(params, specs, shapes, named, facts)
        return lambda: self._extend(key, bucket, tensors, states, named, facts)

    def _extend(
        self, key: Any, bucket: Bucket, tensors: list[Tensor], states: list[dict[str, Any]],
        named: list[dict[str, float]], facts: list[dict[str, float]],
    ) -> None:  # fmt: skip
        self._extend_numbers(bucket, tensors, named, facts)
        for position, tensor in enumerate(tensors, len(bucket.tensors)):
            tensor.bucket, tensor.position = bucket, position
        bucket.tensors += tensors
        bucket.params += [t.array for t in tensors]
        bucket.states += states
        bucket.facts += facts
        bucket.groups = np.array([t.group for t in bucket.tensors], np.int64)
        counts = np.concatenate([self.host.numbers(bucket.counts.numbers), np.zeros(len(tensors))]).astype(np.int64)
        if bucket.resident:
            bucket.counts = DeviceCounts(self.arrays.vector(counts, bucket.device), bucket.library)
            self.shared.count_by(bucket.library)
        else:
            bucket.counts = Counts(self.arrays.vector(counts))
        bucket.rebind()
        self.buckets[key] = bucket

    def _extend_numbers(
        self, bucket: Bucket, tensors: Sequence[Tensor], named: Sequence[Mapping[str, float]],
        facts: Sequence[Mapping[str, float]],
    ) -> None:  # fmt: skip
        """The first values of the states that are single numbers for a tensor, a group or the model."""
        first = len(bucket.tensors)
        for buffer in bucket.program.states:
            letters = buffer.axes.letters
            if buffer.init is None or {"b", "i", "j"} & set(letters):
                continue
            initial = np.array([float(evaluate_once(buffer.init, h, f, {})) for h, f in zip(named, facts, strict=True)])
            if "n" in letters:
                old = self.host.numbers(bucket.scalar_states[buffer.name].numbers) if first else np.zeros(0)
                device = bucket.device if bucket.knows_only_there(buffer.name) else None
                bucket.scalar_states[buffer.name] = self.arrays.vector(np.concatenate([old, initial]), device)
                continue
            of_group = "k" in letters
            places = [t.group if of_group else 0 for t in tensors]
            self.shared.start(buffer.name, of_group, places, initial, self._number_library(bucket, buffer.name))

    def _number_library(self, bucket: Bucket, state: str) -> Library:
        """What a state that is a number is kept with: on the device where it follows from what is known there alone."""
        return bucket.library if bucket.knows_only_there(state) else self.host

    def _facts(self, tensor: Tensor) -> dict[str, float]:
        return {**tensor.view.facts, "machine_eps": EPS[self.arrays.dtype(tensor.array)]}

    def _named_of(self, tensor: Tensor, hyper: Numbers) -> dict[str, float]:
        return dict(zip(self.hyper_names, hyper[:, tensor.group].tolist(), strict=True))

    @property
    def joins(self) -> bool:
        """Whether a tensor's update needs other tensors'."""
        return any(compile(t.rule, self._facts(t)).joins for t in self.tensors)

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
        """HyperError where a value lies outside its range, or differs between groups where it must not."""
        if hyper.shape[1] == 0:
            return
        # The extremes are in range where all are; a NaN is both.
        for name, low, high in zip(self.hyper_names, hyper.min(axis=1), hyper.max(axis=1), strict=True):
            for value in (float(low), float(high)):
                self.hyper[name].check(name, value, self.rule.name)
        self._check_model_hyper(hyper)
        self._check_static(hyper)

    def _check_static(self, hyper: Numbers) -> None:
        for bucket in self.buckets.values():
            for name, made_for in bucket.static.items():
                values = hyper[self.hyper_names.index(name)][bucket.groups]
                if (others := values[values != made_for]).size:
                    raise HyperError(
                        f"{name} of {self.rule.name} cannot change from {made_for:g} to {others[0]:g} after the first "
                        f"step: kernels and states were made for it; make a new optimizer"
                    )

    def _check_model_hyper(self, hyper: Numbers) -> None:
        for name in sorted(self._model_hyper):
            values = hyper[self.hyper_names.index(name)]
            if not (values == values[0]).all():
                raise HyperError(
                    f"{name} of {self.rule.name} is part of a state of the whole model, so every group needs the same "
                    f"value, not {', '.join(f'{v:g}' for v in np.unique(values))}"
                )

    def step(
        self, ids: tuple[int, ...], grads: Sequence[Any], hyper: Numbers, inputs: Mapping[str, Any] | None = None
    ) -> None:
        """One step of these tensors with these gradients. Nothing is written where anything is wrong."""
        self.begin()
        try:
            self.fire(ids, grads, hyper, inputs)
        finally:
            self.finish()

    def begin(self) -> None:
        """Opens a step: group- and model-wide values advance once in it, however many times tensors fire."""
        self.shared.begin()

    def finish(self) -> None:
        """Closes a step: what groups and the model remember takes its new value."""
        self.shared.finish()
        self.skipped_there.close()

    def fire(
        self, ids: tuple[int, ...], grads: Sequence[Any], hyper: Numbers, inputs: Mapping[str, Any] | None = None
    ) -> None:
        """Updates these tensors, each once. Everything is checked, for all buckets, before anything is written."""
        run(self.ready(ids, grads, hyper, inputs))

    def ready(
        self, ids: tuple[int, ...], grads: Sequence[Any], hyper: Numbers, inputs: Mapping[str, Any] | None = None,
        scaling: Scaling | None = None,
    ) -> list[Launch]:  # fmt: skip
        """What `run` needs to update these tensors; everything is checked and nothing written.

        `hyper` is a table that is not changed afterwards: the same object stands for the same numbers. `inputs` has
        what the rule names under `inputs`: a number, or a list of one array for each of these tensors. `scaling` is
        how gradients were scaled, where tensors are resident.
        """
        if hyper is not self._hyper:
            self._take(hyper)
        before, parts = self._last
        if before is not ids:
            parts = self._parts(ids, grads)
            self._last = (ids, parts)
        if self.rule.inputs or inputs:
            self._check_inputs(inputs or {}, len(ids))
        return [
            launch
            for part in parts
            for launch in self._launches(part, grads if part.pick is None else part.pick(grads), inputs or {}, scaling)
        ]

    def _check_inputs(self, inputs: Mapping[str, Any], count: int) -> None:
        for name, kind in self.rule.inputs.items():
            if name not in inputs:
                raise TensorError(f"{self.rule.name} needs the input {name!r} at every step")
            if kind == "like p" and len(inputs[name]) != count:
                raise TensorError(f"the input {name!r} has {len(inputs[name])} arrays for {count} parameters")
        for name in inputs:
            if name not in self.rule.inputs:
                raise TensorError(f"{self.rule.name} has no input {name!r}{did_you_mean(name, self.rule.inputs)}")

    def _take(self, hyper: Numbers) -> None:
        """Checks hyper-parameters and keeps them, together with each name's values."""
        if hyper.shape != self._hyper.shape or hyper.tobytes() != self._hyper.tobytes():
            self.check_hyper(hyper)
        self._hyper = hyper
        self.named = dict(zip(self.hyper_names, hyper, strict=True))

    def _parts(self, ids: tuple[int, ...], grads: Sequence[Any]) -> list[Part]:
        parts = self._plans.get(ids)
        if parts is None:
            if any(self.tensors[i].bucket is None for i in ids):
                self.prepare(ids, [self.arrays.dtype(g) for g in grads], self._hyper)
            if len(self._plans) >= _PLANS:
                self._plans.clear()
            parts = self._plans[ids] = self._partition(ids)
        return parts

    def _partition(self, ids: Sequence[int]) -> list[Part]:
        places: dict[int, list[int]] = {}
        for place, i in enumerate(ids):
            places.setdefault(id(self.tensors[i].bucket), []).append(place)
        return [self._part([self.tensors[ids[p]] for p in at], at, len(ids)) for at in places.values()]

    def _part(self, tensors: list[Tensor], places: list[int], total: int) -> Part:
        bucket = tensors[0].bucket
        assert bucket is not None
        positions = [t.position for t in tensors]
        if len(set(positions)) != len(positions):
            raise TensorError("a tensor is updated twice in one call: give each its whole gradient once")
        names = [t.name for t in tensors]
        check = self.arrays.gradient_check([t.array for t in tensors], bucket.layout.dtype("g"), names)
        pick: Callable[[Sequence[Any]], Sequence[Any]] | None = None
        if len(places) != total:
            pick = lambda found: [found[i] for i in places]  # noqa: E731
        if positions == list(range(len(bucket.tensors))):
            return Part(bucket, None, None, pick, check)
        return Part(bucket, positions, np.array(positions), pick, check)

    def change(self, way: Callable[[Rule], Rule | None], hyper: Numbers) -> None:
        """Runs one step of another rule over every tensor that has states, without gradients. Nothing is counted.

        `way` gives, for the rule of a tensor, one of the same hyper-parameters and states, whose `t` is the count of
        updates so far; None leaves the tensor as it is.
        """
        if hyper is not self._hyper:
            self._take(hyper)
        launches: list[Launch] = []
        for bucket in self.buckets.values():
            key = way, id(bucket.program.rule)
            if key not in self._ways:
                self._ways[key] = way(bucket.program.rule)
            rule = self._ways[key]
            if rule is not None:
                other = bucket.under(compile(rule, bucket.facts[0], bucket.static))
                launches += self._launches(Part(other, None, None, None, list), other.params, {})
        run(launches)

    def ready_part(
        self, ids: tuple[int, ...], grads: Sequence[Any], hyper: Numbers, way: Callable[[Rule], Rule], counts: bool
    ) -> list[Launch]:  # fmt: skip
        """As `ready`, of a part of a step of these tensors: `way` gives its rule, of the same states, for a tensor's.

        `t` is that of the step, which is counted by the part that `counts`.
        """
        if hyper is not self._hyper:
            self._take(hyper)
        launches: list[Launch] = []
        for part in self._parts(ids, grads):
            bucket = part.bucket
            key = way, id(bucket)
            if key not in self._within:
                program = compile(way(bucket.program.rule), bucket.facts[0], bucket.static)
                self._within[key] = bucket.within(program, counts)
            own = replace(part, bucket=self._within[key], pick=None)
            launches += self._launches(own, grads if part.pick is None else part.pick(grads), {})
        return launches

    # Launches

    def _launches(
        self, part: Part, grads: Sequence[Any], inputs: Mapping[str, Any], scaling: Scaling | None = None
    ) -> Iterator[Launch]:
        bucket, fired = part.bucket, part.fired
        grads = part.check(grads)
        given = self._inputs_of(part, inputs) if inputs else {}
        if bucket.resident:
            yield self._resident(part, grads, given, scaling)
            return
        if scaling is not None:
            raise TensorError(
                f"{self.rule.name} cannot take scaled gradients on {bucket.device}: unscale them before the step"
            )
        if bucket.program.predicates:
            yield from self._decided(part, grads, given)
            return
        version = bucket.version()
        rows = version.rows
        assert isinstance(rows, RowSource)
        counts = bucket.counts
        if isinstance(counts, Counts) and not (rows.own_rows or rows.numbers or self.shared.values):
            common = counts.common(fired)
            if common is not None:
                table = rows.shared(common + 1, self.named)
                yield Launch(self, part, version, grads, table, {}, given)
                return
        yield self._separate(part, version, grads, given)

    def _resident(self, part: Part, grads: Sequence[Any], given: Mapping[str, Any], scaling: Scaling | None) -> Launch:
        """A launch of which the host knows neither the counts nor the scalars."""
        bucket = part.bucket
        version = bucket.version()
        rows = version.rows
        assert isinstance(rows, DeviceRows)
        hyper = self._device_hyper.of(bucket, self.named, self._hyper, self.live)
        shared = [*self.shared.values.values(), self.shared.group_t, self.shared.model_t]
        # A graph goes on reading these where other tensors join, and they are replaced.
        bucket.library.hold((version.call, rows, hyper.table, bucket.counts, [*bucket.scalar_states.values()], shared))
        table, stored = rows.evaluate(version.call, bucket, hyper, self.shared)
        made = Rows(table, rows.index)
        if scaling is not None:
            made = replace(made, stays=rows.all_alike(scaling.found_inf), scale=rows.scale(scaling.scale))
        return Launch(self, part, version, grads, made, stored, given)

    def _separate(self, part: Part, version: Version, grads: Sequence[Any], given: Mapping[str, Any]) -> Launch:
        """A launch whose tensors have rows of their own in the scalar table."""
        bucket, fired = part.bucket, part.fired
        t = self._next_counts(part)
        rows = version.rows
        assert isinstance(rows, RowSource)
        states = {k: v.numbers for k, v in bucket.scalar_states.items()} | self.shared.values
        states = {k: self.host.numbers(states[k]) for k in rows.table.loads}
        levels = {}
        if self.shared.values:
            group_t, model_t = self.host.numbers(self.shared.group_t), self.host.numbers(self.shared.model_t)
            levels = {"group": group_t + 1, "model": model_t[0] + 1}
        table, stored = rows.separate(t, fired, self.named, states, levels)
        return Launch(self, part, version, grads, table, stored, given)

    def _next_counts(self, part: Part) -> Any:
        numbers = part.bucket.counts.numbers
        return (numbers if part.fired is None else numbers[part.fired]) + 1

    def _inputs_of(self, part: Part, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """The inputs for the tensors of a part, those like parameters checked as gradients are."""
        found: dict[str, Any] = {}
        used = {b.name for b in part.bucket.program.buffers if b.role == "input"}
        for name, value in ((k, v) for k, v in inputs.items() if k in used):
            if self.rule.inputs[name] != "like p":
                there = getattr(part.bucket.backend, "on_device", False) and hasattr(value, "device")
                found[name] = value if there else _number(value, name)
                continue
            chosen = value if part.pick is None else part.pick(value)
            names = [f"{t.name} (its {name})" for t in part.tensors]
            check = self.arrays.gradient_check([t.array for t in part.tensors], part.bucket.layout.dtype(name), names)
            found[name] = check(chosen)
        return found

    def _decided(self, part: Part, grads: Sequence[Any], given: Mapping[str, Any]) -> Iterator[Launch]:
        """A launch for each outcome of the program's predicates among the tensors."""
        bucket = part.bucket
        outcomes = self._outcomes(part)
        if len(set(outcomes)) == 1:
            yield self._separate(part, bucket.version(outcomes[0]), grads, given)
            return
        positions = part.positions or list(range(len(bucket.tensors)))
        for outcome in sorted(set(outcomes)):
            mine = [i for i, found in enumerate(outcomes) if found == outcome]
            own = [positions[i] for i in mine]
            smaller = Part(bucket, own, np.array(own), None, part.check)
            chosen = {k: v if isinstance(v, float) else [v[i] for i in mine] for k, v in given.items()}
            yield self._separate(smaller, bucket.version(outcome), [grads[i] for i in mine], chosen)

    def _outcomes(self, part: Part) -> list[tuple[bool, ...]]:
        bucket = part.bucket
        groups = bucket.groups if part.fired is None else bucket.groups[part.fired]
        facts = bucket.facts if part.positions is None else [bucket.facts[i] for i in part.positions]
        table = ScalarTable.of([node for _, node in bucket.program.predicates])
        chosen = {k: v[groups] for k, v in self.named.items()}
        known = {f: np.array([x[f] for x in facts]) for f in table.facts}
        t = np.asarray(self._next_counts(part), np.float64)
        values, _ = table.evaluate((len(groups),), chosen, t, known, {})
        return [tuple(row) for row in (values != 0).tolist()]

    # Scratch

    def scratch(self, slot: Any, like: Any, dtype: str) -> Any:
        """Memory for one step, like a parameter; the same again for the same slot, which says the device, and shape."""
        key = (slot, self.arrays.shape(like), dtype)
        found = self._scratch.get(key)
        if found is None:
            found = self._scratch[key] = self.arrays.scratch(like, dtype)
        return found


def default_hyper(rule: Rule, given: Mapping[str, float], dtype: str = "float32") -> dict[str, float]:
    """Every hyper-parameter of a rule, and of those it routes tensors to: given, or by default."""
    hyper = rule.settings
    for key in given:
        if key not in hyper:
            raise HyperError(f"{rule.name} has no hyper-parameter {key!r}{did_you_mean(key, hyper)}")
    return resolve_hyper(hyper, given, EPS[dtype], rule.name)


def _check_shared(rules: Sequence[Rule]) -> None:
    """RuleError where rules that tensors are routed to keep one state of a group or the model in different ways."""
    found: dict[str, tuple[Rule, Any]] = {}
    for rule in rules:
        for name, state in rule.state.items():
            if state.per not in ("group", "model"):
                continue
            made = state.per, state.init, [line.value for line in assignments(rule.step) if line.target == name]
            first, before = found.setdefault(name, (rule, made))
            if before != made:
                raise RuleError(
                    f"{first.name} and {rule.name}, which gets the other tensors, both keep {name} per {state.per}, "
                    f"and not the same: give one of them another name"
                )


def _model_hyper(program: Program) -> set[str]:
    """The hyper-parameters that the whole model's states are made of, their first values included."""
    roots = [c.value for c in program.scalars.columns] + [s.value for s in program.scalars.stores]
    first = [b.init for b in program.states if b.init is not None and not b.axes.letters]
    return {str(n.arg) for n in walk(roots) if n.op is Op.MODEL_HYPER} | {
        str(n.arg) for n in walk(first) if n.op is Op.HYPER
    }


def _number(value: Any, name: str) -> float:
    """An input that is one number."""
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise TensorError(f"the input {name!r} must be one number, not {type(value).__name__} {value!r:.80}") from None
