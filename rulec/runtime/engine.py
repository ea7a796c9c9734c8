"""The engine: tensors in buckets, hyper-parameters, and steps.

An adapter adds its tensors, then calls `step`, or `begin`, any number of `fire`, and `end`. Nothing here knows a
framework: `Arrays` hides the kind of array, `Backend` the machine.

`Buckets` holds the tensors in buckets, `Partitions` the tensors that fire together, `HyperValues` the hyper-parameters
of a step. `Launcher` makes launches; `EngineContext` holds the numbers and the memory that they share.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rulec.backend.protocol import Backend
from rulec.compiler.layout import array_buffers, is_shaped
from rulec.compiler.pipeline import compile
from rulec.compiler.routing import Router
from rulec.errors import RuleError, TensorError
from rulec.formats import UNBIASED, Format
from rulec.language.hyper import checked_seed
from rulec.language.rule import Rule
from rulec.language.rule_data import RuleData, assignments, draws
from rulec.language.statistics import Watch
from rulec.runtime.arrays import Arrays
from rulec.runtime.buckets.bucket import Bucket, Tensor
from rulec.runtime.buckets.bucketing import Buckets
from rulec.runtime.buckets.context import EngineContext
from rulec.runtime.buckets.hyper import EPS, HyperValues, default_hyper
from rulec.runtime.buckets.launch import Launch, Part, Partitions
from rulec.runtime.buckets.launch_builder import Launcher
from rulec.runtime.buckets.reductions import Processes
from rulec.runtime.buckets.scalar_table import Numbers
from rulec.runtime.buckets.scalar_table_device import Scaling
from rulec.runtime.distributed.shards import GlobalTensor
from rulec.runtime.evaluations import EvaluationNames, wants
from rulec.runtime.keyed import COUNT, Key, in_order
from rulec.runtime.layers import Layer
from rulec.runtime.stages.step import run, was_interrupted
from rulec.runtime.statistics import Statistics
from rulec.runtime.storage.options import Storage

__all__ = ["EPS", "Engine", "Launch", "default_hyper", "run", "was_interrupted"]


class Engine:
    """Runs one rule over any number of tensors.

    `backend` is a backend for all tensors, or its name; by default each device has its own. `state_dtype` gives the
    storage dtype of states by name (`""` for all of them); by default a state has its parameter's. `seed` is for the
    rule's random numbers. `weights` is the kind of parameters of 16 bits in memory, of `rulec.compiler.weights`; empty
    for plain ones. If `exclusive`, steps alone write the parameters, and those with a master copy are not read.
    `processes` take part in reductions over groups and the model.

    `watch` are statistics to measure, as in `rulec.language.statistics.watched`; a step measures them where
    `statistics.due`.

    If it `begins`, stages of a step may run before it: see `may_begin`. They write nothing where they can do without.

    If `resident`, step counts and scalars of tensors on a device are on the device, and a step can be captured and
    run again. `live` then has arrays on the device by (name, group): hyper-parameters that every step reads anew.
    """

    def __init__(
        self, rule: Rule, arrays: Arrays, backend: str | Backend | None = None,
        state_dtype: Mapping[str, str] | None = None, maximize: bool = False, seed: int = 0, resident: bool = False,
        processes: Processes | None = None, weights: str = "", watch: Watch | None = None, exclusive: bool = False,
        begins: bool = False,
    ) -> None:  # fmt: skip
        self.rule = rule.standalone()
        self.arrays, self.backend_name, self.maximize, self.seed = arrays, backend, maximize, checked_seed(seed)
        self.state_dtype = dict(state_dtype or {})
        router = Router(self.rule)
        self.weights, storage = weights, Storage(self.state_dtype, weights, exclusive)
        storage.check(router.rules)
        _check_shared(router.rules)
        self._values = HyperValues(self.rule)
        self._common = EngineContext(arrays, self._values, processes or Processes(), self.seed)
        self._homes = Buckets(router, self._common, backend, storage, resident, begins)
        self._partitions = Partitions(self._homes.tensors, arrays)
        self._launcher = Launcher(self.rule, self._common, router.rules)
        self.hyper, self.hyper_names = self._values.known, self._values.names
        self.tensors, self.buckets = self._homes.tensors, self._homes.by_key
        self.host, self.shared, self.device_skips = self._common.host, self._common.shared, self._common.device_skips
        self._last: tuple[tuple[int, ...], list[Part]] = ((), [])
        self._ways: dict[Any, RuleData | None] = {}
        self._within: dict[Any, Bucket | None] = {}
        self.passes = EvaluationNames(router.rules)
        self.statistics = Statistics(router.rules, watch)
        #: Whether an interrupt came into a step that had written.
        self.unfinished = False
        weakref.finalize(self, _forget_buckets, self.tensors).atexit = False

    @property
    def live(self) -> dict[tuple[str, int], Any]:
        """Hyper-parameters as arrays on the device, by (name, group); every step reads them anew."""
        return self._values.live

    @live.setter
    def live(self, live: dict[tuple[str, int], Any]) -> None:
        self._values.live = live

    @property
    def skipped(self) -> int:
        """The number of updates of tensors that the rule's `skip` prevented so far, as far as the host knows."""
        return self._common.skipped

    @property
    def extensions(self) -> int:
        """The number of times that states got other arrays: tensors joined buckets, or histories turned."""
        return self._homes.extensions + self._common.turned

    # Tensors and buckets

    def add(
        self, array: Any, group: int, name: str, tags: frozenset[str] = frozenset(), number: int | None = None,
        maximize: bool | None = None, whole: GlobalTensor | None = None, in_group: tuple[int, int] | None = None,
        layer: Layer | None = None,
    ) -> int:  # fmt: skip
        """Adds a parameter and returns its id. Its state is allocated at its first gradient.

        `tags` are its words for `tagged(...)`. `number`, its id by default, makes its random numbers different from
        other tensors'. `maximize` is the engine's by default. `whole` is the global tensor of a sharded parameter.
        `in_group` is its number in its group and the count of the group, by default of the parameters that are added.
        `layer` is the number of its layer and the count of layers; a rule that reads it needs it.
        RuleError where the rule does not apply to it and names no other.
        """
        maximize = self.maximize if maximize is None else maximize
        return self._homes.add(array, group, name, tags, number, maximize, whole, in_group, layer)

    def replace(self, tensor_id: int, array: Any) -> None:
        """Another array in the place of a parameter, of the same shape and dtype."""
        self._homes.replace(tensor_id, array)
        self.forget_parts()

    def relocate(self, arrays: Mapping[int, Mapping[str, Any]]) -> bool:
        """Takes over states whose memory moved, of the same shapes and dtypes: arrays by tensor and by name.

        False, and nothing done, where a step count or another number of a tensor lies apart from those of its bucket.
        """
        if not self._homes.relocate(arrays):
            return False
        self.forget_parts()
        return True

    def prepare(self, ids: Sequence[int], grad_dtypes: Sequence[str] | None, hyper: Numbers) -> None:
        """Puts new tensors in buckets and allocates their states.

        `grad_dtypes` are the dtypes of the gradients; None expects each parameter's dtype.
        """
        if self._homes.prepare(ids, grad_dtypes, hyper):
            self.forget_parts()

    def place(self, bucket: Bucket, states: Sequence[Mapping[str, Any]]) -> None:
        """Has kernels read and write the states of a bucket's tensors in other memory, until tensors move or join.

        Whoever asks for it brings them there and back: see `rulec.runtime.buckets.launch.Transfers`.
        """
        bucket.moved = bucket.over(states)
        self.forget_parts()

    def forget_parts(self) -> None:
        """Forgets the sets of tensors that fired together, because kernels find something of theirs elsewhere."""
        self._partitions.forget()
        self._last, self._within = ((), []), {}

    def needs_copy(self, tensor_id: int, hyper: Numbers) -> bool:
        """Whether a parameter lies in memory in another order than its shape's, and its rule looks at its matrices.

        `prepare` refuses it then: a contiguous copy must take its place.
        """
        return self._homes.needs_copy(tensor_id, hyper)

    @property
    def joins(self) -> bool:
        """Whether the update of a tensor needs values of other tensors."""
        return self._homes.joins

    def state(self, tensor_id: int) -> dict[str, Any]:
        """The states of a tensor by name, and its step count as `step`; empty before its first gradient."""
        tensor = self.tensors[tensor_id]
        if tensor.bucket is None:
            return {}
        states = {COUNT: tensor.bucket.counts.views[tensor.position], **tensor.bucket.states[tensor.position]}
        return states | {k: v.views[tensor.position] for k, v in tensor.bucket.scalar_states.items()}

    def by_key(self) -> dict[Key, Any]:
        """All states and step counts: the memory that steps write."""
        states: dict[Key, Any] = {(name, None): numbers for name, numbers in self.shared.states.items()}
        for i in range(len(self.tensors)):
            states |= {(name, i): array for name, array in self.state(i).items()}
        return in_order(states)

    def formats(self, tensor_id: int) -> dict[str, Format]:
        """The formats of a tensor's quantized states, by name; empty before its first gradient."""
        bucket = self.tensors[tensor_id].bucket
        return {} if bucket is None else dict(bucket.layout.formats)

    def storage(self, tensor_id: int) -> dict[str, str]:
        """State -> its dtype or format as users write it, for a tensor's arrays; empty before its first gradient."""
        bucket = self.tensors[tensor_id].bucket
        if bucket is None:
            return {}
        formats = {name: form.text for name, form in bucket.layout.formats}
        arrays = [b.name for b in array_buffers(bucket.program) if b.role == "state"]
        formats |= dict.fromkeys(bucket.program.memory.unbiased, UNBIASED)
        return {name: formats.get(name, bucket.layout.dtype(name)) for name in arrays}

    def rounds(self, tensor_id: int) -> bool:
        """Whether a step rounds a tensor or a state of it at random."""
        return self._homes.memory(self.tensors[tensor_id]).random

    # Hyper-parameters

    def hyper_table(self, groups: Sequence[Mapping[str, float]]) -> Numbers:
        """The hyper-parameters as a float64 table (names, groups), for `step`."""
        return self._values.table_of(groups)

    def check_hyper(self, hyper: Numbers) -> None:
        """HyperError where a value lies outside its range, or differs between groups where it must not."""
        self._values.check(hyper, self.buckets.values())

    # Steps

    def step(
        self, ids: tuple[int, ...], grads: Sequence[Any], hyper: Numbers, inputs: Mapping[str, Any] | None = None
    ) -> None:
        """One step of the tensors `ids` with `grads`, in the same order. Nothing is written where anything is wrong."""
        self.begin()
        launches: list[Launch] = []
        try:
            try:
                launches = self.ready(ids, grads, hyper, inputs)
                run(launches)
            finally:
                self.end()
        except BaseException as error:
            self.unfinished = was_interrupted(launches, error)
            raise

    def begin(self) -> None:
        """Opens a step: values of groups and the model advance once in it, for any number of `fire`."""
        self.shared.begin()

    def end(self) -> None:
        """Closes a step: states of groups and the model take their new values."""
        self.shared.end()
        self.device_skips.close()

    def fire(
        self, ids: tuple[int, ...], grads: Sequence[Any], hyper: Numbers, inputs: Mapping[str, Any] | None = None
    ) -> None:
        """Updates these tensors, each once. Everything is checked, for all buckets, before anything is written."""
        run(self.ready(ids, grads, hyper, inputs))

    def ready(
        self, ids: tuple[int, ...], grads: Sequence[Any], hyper: Numbers, inputs: Mapping[str, Any] | None = None,
        scaling: Scaling | None = None,
    ) -> list[Launch]:  # fmt: skip
        """The launches of updates of these tensors, for `run`. Everything is checked and nothing written.

        `hyper` is a table that is not changed afterwards: the same object stands for the same numbers. `inputs` has
        the rule's inputs by name, each a number or a list of one array for each tensor. `scaling` is the scale of the
        gradients, for tensors with device scalars.
        """
        if hyper is not self._values.table:  # written out: a step counts its calls
            self._values.take(hyper, self.buckets.values())
        before, parts = self._last
        if before is not ids:
            parts = self._parts(ids, grads)
            self._last = (ids, parts)
        if inputs:
            self._launcher.check_inputs(inputs, len(ids))
        if self.statistics.due:
            parts = self.statistics.parts(parts)
        launches, alike = self._launcher.launches, self._launcher.are_alike(parts)
        ready = [
            launch
            for part in parts
            for launch in launches(part, grads if part.pick is None else part.pick(grads), inputs or {}, scaling, alike)
        ]
        if self.statistics.due:
            for launch in ready:  # written out: a step counts its calls
                self.statistics.launches += [launch.statistics]
        return ready

    def ready_each(
        self, sets: Sequence[tuple[tuple[int, ...], Sequence[Any]]], hyper: Numbers,
        inputs: Mapping[str, Any] | None = None, alike: bool | None = None,
    ) -> list[list[Launch]]:  # fmt: skip
        """As `ready` for all tensors of a step, in several sets of ids and gradients: the launches of each set.

        `inputs` are numbers. If the step has tensors in no set, `alike` is what `are_alike` returns for all of them.
        """
        self.take_table(hyper)
        each = [pair for ids, grads in sets for pair in zip(ids, grads, strict=True)]
        if any(self.tensors[i].bucket is None for i, _ in each):
            self.prepare([i for i, _ in each], [self.arrays.dtype(grad) for _, grad in each], hyper)
        cut = [(self._measured(self._parts(ids, grads)), grads) for ids, grads in sets]
        launches = self._launcher.launches
        if alike is None:
            alike = self._launcher.are_alike([part for parts, _ in cut for part in parts])
        ready = [
            [
                launch
                for part in parts
                for launch in launches(
                    part, grads if part.pick is None else part.pick(grads), inputs or {}, alike=alike
                )
            ]
            for parts, grads in cut
        ]
        if self.statistics.due:
            self.statistics.launches += [launch.statistics for each in ready for launch in each]
        return ready

    def are_alike(self, ids: tuple[int, ...]) -> bool:
        """Whether every predicate has one outcome for these tensors, as far as they share reductions.

        All of them have states.
        """
        if not any(bucket.program.predicates and bucket.program.joins for bucket in self.buckets.values()):
            return True
        return self._launcher.are_alike(self._measured(self._parts(ids, ())))

    def _measured(self, parts: list[Part]) -> list[Part]:
        """The parts as they are in this step: under programs with statistics, where it measures them."""
        return self.statistics.parts(parts) if self.statistics.due else parts

    def _parts(self, ids: tuple[int, ...], grads: Sequence[Any]) -> list[Part]:
        parts = self._partitions.known.get(ids)
        if parts is None:
            if any(self.tensors[i].bucket is None for i in ids):
                self.prepare(ids, [self.arrays.dtype(g) for g in grads], self._values.table)
            parts = self._partitions.cut(ids)
        return parts

    def ready_rows(self, tensor_id: int, param: Any, states: Mapping[str, Any], grad: Any) -> list[Launch]:
        """The launches of an update of some rows of a tensor: see `check_rows`. The tensor's step count advances.

        `param`, `states` by name and `grad` are these rows, as arrays of their own, of one shape; the update is written
        there. The hyper-parameters come from the last `ready`, or from `take_table`.
        """
        tensor = self.tensors[tensor_id]
        assert tensor.bucket is not None
        bucket = tensor.bucket.of_rows(tensor.position, param, states)
        check = self.arrays.gradient_check([param], bucket.layout.dtype("g"), [tensor.name])
        part = Part(bucket, [tensor.position], np.array([tensor.position]), None, check)
        return [*self._launcher.launches(part, [grad], {})]

    def take_table(self, hyper: Numbers) -> None:
        """Takes over a table of hyper-parameters."""
        if hyper is not self._values.table:
            self._values.take(hyper, self.buckets.values())

    def check_rows(self, tensor_id: int) -> None:
        """TensorError where an update of some rows of a tensor is not the update of each element by itself."""
        tensor = self.tensors[tensor_id]
        bucket = tensor.bucket
        assert bucket is not None
        why = (
            "reads more than one element at a time" if is_shaped(bucket.program) or len(bucket.program.stages) > 1
            or any(stage.reduces for stage in bucket.program.stages)
            else "draws random numbers" if draws(tensor.rule) or self.rounds(tensor_id)
            else "keeps states in codes" if bucket.layout.formats
            else "keeps step counts on the device" if bucket.resident
            else "reads inputs" if tensor.rule.inputs
            else ""
        )  # fmt: skip
        if why:
            raise TensorError(
                f"the gradient of {tensor.name} is sparse, and {self.rule.name} {why}: make its layer with sparse=False"
            )

    # Steps of other rules

    def change(self, way: Callable[[RuleData], RuleData | None], hyper: Numbers) -> None:
        """Runs one step of another rule over every tensor with states, without gradients. Step counts stay.

        `way` maps the rule of a tensor to a rule of the same hyper-parameters and states; its `t` is the count of
        updates so far. None leaves the tensor as it is.
        """
        run(self.changes(way, hyper, [Part(bucket, None, None, None, list) for bucket in self.buckets.values()]))

    def changes_of(
        self, way: Callable[[RuleData], RuleData | None], hyper: Numbers, sets: Sequence[tuple[int, ...]]
    ) -> list[Launch]:  # fmt: skip
        """The launches of such a step of tensors with states, in several sets of ids."""
        return self.changes(way, hyper, [part for ids in sets for part in self._parts(ids, ())])

    def changes(
        self, way: Callable[[RuleData], RuleData | None], hyper: Numbers, parts: Sequence[Part]
    ) -> list[Launch]:
        """The launches of such a step of some parts."""
        self.take_table(hyper)
        others: dict[int, Bucket | None] = {}
        launches: list[Launch] = []
        for part in parts:
            bucket = part.bucket
            if id(bucket) not in others:
                others[id(bucket)] = self._changed(way, bucket)
            other = others[id(bucket)]
            if other is not None:
                changed = replace(part, bucket=other, pick=None, check=list, _portions={})
                launches += self._launcher.launches(changed, [tensor.array for tensor in part.tensors], {})
        return launches

    def _changed(self, way: Callable[[RuleData], RuleData | None], bucket: Bucket) -> Bucket | None:
        """A bucket under another rule, as `way` maps its own; None where it maps to none."""
        key = way, id(bucket.program.rule)
        if key not in self._ways:
            self._ways[key] = way(bucket.program.rule)
        rule = self._ways[key]
        if rule is None:
            return None
        return bucket.under(compile(rule, bucket.facts[0], bucket.static, memory=bucket.program.memory))

    def ready_part(
        self, ids: tuple[int, ...], grads: Sequence[Any], hyper: Numbers, way: Callable[[RuleData], RuleData | None],
        counts: bool, inputs: Mapping[str, Any] | None = None,
    ) -> list[Launch]:  # fmt: skip
        """As `ready`, for one part of a step: `way` maps the rule of a tensor to the part's rule, of the same states.

        All parts have the `t` of the step; the part with `counts` advances it. None leaves a tensor as it is.
        """
        self.take_table(hyper)
        chosen: list[Part] = []
        for part in self._parts(ids, grads):
            bucket = part.bucket
            key = way, id(bucket)
            bucket.stop_turning()
            if key not in self._within:
                rule = way(bucket.program.rule)
                self._within[key] = None
                if rule is not None:
                    program = compile(rule, bucket.facts[0], bucket.static, memory=bucket.program.memory)
                    self._within[key] = bucket.within(program, counts)
            within = self._within[key]
            if within is not None:
                chosen.append(replace(part, bucket=within, _portions={}))
        alike = self._launcher.are_alike(chosen)
        return [
            launch
            for part in chosen
            for launch in self._launcher.launches(
                part, grads if part.pick is None else part.pick(grads), inputs or {}, alike=alike
            )
        ]

    def wants(self, ids: Sequence[int], place: int, hyper: Numbers) -> bool:
        """Whether any of these tensors has the evaluation with this index in its next step."""
        return wants([self.tensors[i] for i in ids], place, lambda t: self._values.of_group(hyper, t.group))


def _check_shared(rules: Sequence[Rule]) -> None:
    """RuleError where two rules of a routing define one state of a group or the model differently."""
    definitions: dict[str, tuple[Rule, Any]] = {}
    for rule in rules:
        for name, state in rule.state.items():
            if state.per not in ("group", "model"):
                continue
            definition = state.per, state.init, [line.value for line in assignments(rule.step) if line.target == name]
            first, before = definitions.setdefault(name, (rule, definition))
            if before != definition:
                raise RuleError(
                    f"{first.name} and {rule.name}, which gets the other tensors, both keep {name} per {state.per}, "
                    f"and not the same: give one of them another name"
                )


def _forget_buckets(tensors: Iterable[Tensor]) -> None:
    """Ends the circle of tensors and buckets: states are freed with their engine, not at Python's next collection."""
    for tensor in tensors:
        tensor.bucket = None
