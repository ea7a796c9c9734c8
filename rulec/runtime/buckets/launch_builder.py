"""Builds the launches of a set of tensors: checks gradients and inputs, evaluates scalars, chooses kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rulec.backend.protocol import Rows
from rulec.compiler.ir import Buffer, Program
from rulec.compiler.scalars import ScalarTable
from rulec.errors import TensorError
from rulec.language.expr.node import Op, walk
from rulec.language.inputs import InputKind, per_tensor
from rulec.language.rule import Rule
from rulec.language.source import did_you_mean
from rulec.runtime.buckets.bucket import Version
from rulec.runtime.buckets.context import EngineContext
from rulec.runtime.buckets.launch import Launch, Part
from rulec.runtime.buckets.scalar_table import ScalarRows
from rulec.runtime.buckets.scalar_table_device import DeviceScalarRows, Scaling
from rulec.runtime.storage.allocator import array_shape


class Launcher:
    """Makes the launches of one engine's steps."""

    def __init__(self, rule: Rule, common: EngineContext, rules: Sequence[Rule]) -> None:
        self.rule, self.common = rule, common
        #: The inputs of the rules of tensors, and those of their passes.
        self._kinds = {k: kind for each in rules for k, kind in inputs_of(each).items()}

    def check_inputs(self, inputs: Mapping[str, Any], count: int) -> None:
        """Checks the names of a step's inputs, and that each input like `p` has one array for each of `count` tensors.

        TensorError where an input is not of the rule, or the number of arrays differs.
        """
        for name in inputs:
            if name not in self._kinds:
                raise TensorError(f"{self.rule.name} has no input {name!r}{did_you_mean(name, self._kinds)}")
            if per_tensor(self._kinds[name]) and len(inputs[name]) != count:
                raise TensorError(f"the input {name!r} has {len(inputs[name])} arrays for {count} parameters")

    def launches(
        self, part: Part, grads: Sequence[Any], inputs: Mapping[str, Any], scaling: Scaling | None = None,
        alike: bool = True,
    ) -> Iterator[Launch]:  # fmt: skip
        """The launches that update the tensors of a part. Everything is checked, and nothing written.

        `alike` says whether every predicate has one outcome for all tensors of the step: see `are_alike`.
        """
        bucket, fired = part.bucket, part.fired
        grads = part.check(grads)
        if part.pick is not None and inputs:
            inputs = {k: part.pick(v) if per_tensor(self._kinds[k]) else v for k, v in inputs.items()}
        if bucket.program.predicates and not bucket.resident:
            outcomes = self._outcomes(part)
            if bucket.program.joins or bucket.program.shares_in_branches:
                alike = alike and not self.common.processes.several
                outcomes = [outcome if bucket.specializes(outcome, alike) else () for outcome in outcomes]
            yield from self._each(part, grads, inputs, outcomes, bucket.version)
            return
        if bucket.turning and scaling is None:
            turns = bucket.turns if fired is None else bucket.turns[fired]
            yield from self._each(part, grads, inputs, turns.tolist(), bucket.turned)
            return
        inputs = self._inputs_of(part, bucket.program, inputs) if self._kinds else {}
        if bucket.resident:
            yield self._resident(part, grads, inputs, scaling)
            return
        if scaling is not None:
            raise TensorError(
                f"{self.rule.name} cannot take scaled gradients on {bucket.device}: unscale them before the step"
            )
        version = bucket.version()
        rows = version.rows
        assert isinstance(rows, ScalarRows)
        counts = bucket.counts
        if counts.library is None and not (rows.row_per_tensor or rows.numbers or self.common.shared.values):
            count = counts.common(fired)
            if count is not None:
                table = rows.shared(count + 1, self.common.hyper.named)
                yield Launch(self.common, part, version, grads, table, {}, inputs)
                return
        yield self._separate(part, version, grads, inputs)

    def _resident(self, part: Part, grads: Sequence[Any], inputs: Mapping[str, Any], scaling: Scaling | None) -> Launch:
        """A launch with step counts and scalars on the device, unknown to the host."""
        bucket = part.bucket
        version = bucket.version()
        rows = version.rows
        assert isinstance(rows, DeviceScalarRows)
        hyper = self.common.hyper.on_device(bucket.program, bucket.device, bucket.library)
        shared = self.common.shared
        levels = [*shared.values.values(), shared.group_t, shared.model_t]
        # A captured graph reads these even after other tensors join and they are replaced.
        bucket.library.hold((version.call, rows, hyper.table, bucket.counts, [*bucket.scalar_states.values()], levels))
        table, stored = rows.evaluate(bucket.counts.numbers, bucket.scalar_states, hyper.table, shared)
        launch_rows = Rows(table, rows.index)
        if scaling is not None:
            launch_rows = replace(launch_rows, stays=rows.all_alike(scaling.found_inf), scale=rows.scale(scaling.scale))
        return Launch(self.common, part, version, grads, launch_rows, stored, inputs)

    def _separate(self, part: Part, version: Version, grads: Sequence[Any], inputs: Mapping[str, Any]) -> Launch:
        """A launch with separate rows of the scalar table for tensors of different step counts, groups or states."""
        bucket, fired, common = part.bucket, part.fired, self.common
        t = _next_counts(part)
        rows = version.rows
        assert isinstance(rows, ScalarRows)
        states = {k: v.numbers for k, v in bucket.scalar_states.items()} | common.shared.values
        states = {k: common.host.numbers(states[k]) for k in rows.table.loads}
        levels = {}
        if common.shared.values:
            group_t, model_t = common.host.numbers(common.shared.group_t), common.host.numbers(common.shared.model_t)
            levels = {"group": group_t + 1, "model": model_t[0] + 1}
        table, stored = rows.separate(t, fired, common.hyper.named, states, levels)
        return Launch(common, part, version, grads, table, stored, inputs)

    def _inputs_of(self, part: Part, program: Program, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """The inputs that a program reads, for the tensors of a part. Arrays like `p` are checked as gradients are.

        TensorError where one is missing. What the program does not read may be missing.
        """
        checked: dict[str, Any] = {}
        for buffer in program.buffers:
            name = buffer.name
            if buffer.role != "input":
                continue
            if name not in inputs:
                when = "in this step" if part.bucket.program.predicates else "at every step"
                raise TensorError(f"{self.rule.name} needs the input {name!r} {when}")
            value = inputs[name]
            if per_tensor(program.rule.inputs[name]) and not buffer.axes.elementwise:
                checked[name] = self._matrices(part, buffer, value)
                continue
            if not buffer.axes.elementwise:
                there = part.bucket.capabilities.on_device and hasattr(value, "device")
                checked[name] = value if there else self._number(value, name, program)
                continue
            names = [f"{t.name} (its {name})" for t in part.tensors]
            dtype = part.bucket.layout.dtype(name)
            checked[name] = self.common.arrays.gradient_check([t.array for t in part.tensors], dtype, names)(value)
        return checked

    def _matrices(self, part: Part, buffer: Buffer, values: Sequence[Any]) -> Sequence[Any]:
        """The matrices of an input of a shape of its own, checked; TensorError where one does not fit its tensor."""
        bucket, arrays, name = part.bucket, self.common.arrays, buffer.name
        wanted = bucket.layout.dtype(name)
        for i, value in zip(part.positions or range(len(bucket.tensors)), values, strict=True):
            tensor = bucket.tensors[i]
            what = f"the input {name!r} of {tensor.name}"
            if not hasattr(value, "shape"):
                said = "missing" if value is None else f"a {type(value).__name__}"
                raise TensorError(f"{what} is {said}: {self.rule.name} needs a matrix of it for this parameter")
            hyper = {key: values_of[tensor.group] for key, values_of in self.common.hyper.named.items()}
            shape = array_shape(buffer.axes, tensor.view.whole or tensor.view, hyper, bucket.facts[i])
            if arrays.shape(value) != shape:
                raise TensorError(f"{what} has shape {arrays.shape(value)}, where {shape} is expected")
            if (dtype := arrays.dtype(value)) != wanted:
                raise TensorError(f"{what} is of {dtype}, where {wanted} is expected")
            if arrays.device(value) != bucket.device:
                raise TensorError(f"{what} is on {arrays.device(value)}, and its parameter on {bucket.device}")
        return values

    def _number(self, value: Any, name: str, program: Program) -> float:
        """An input that is one number; TensorError for NaN, where the rule does not ask whether it is one."""
        number = _number(value, name)
        if number != number and not any(n.op is Op.ISFINITE for n in walk(program.rule.expressions)):
            raise TensorError(
                f"the input {name!r} of {self.rule.name} is NaN, and nothing was changed: leave this step out, or let "
                f"the rule test isfinite({name})"
            )
        return number

    def _each(
        self, part: Part, grads: Sequence[Any], inputs: Mapping[str, Any], outcomes: Sequence[Any],
        version: Callable[[Any], Version],
    ) -> Iterator[Launch]:  # fmt: skip
        """A launch for each outcome among the tensors: of the program's predicates, or the turns of its rings."""
        bucket = part.bucket
        if len(set(outcomes)) == 1:
            chosen_version = version(outcomes[0])
            held = self._inputs_of(part, chosen_version.program, inputs)
            yield self._separate(part, chosen_version, grads, held)
            return
        all_positions = part.positions or list(range(len(bucket.tensors)))
        for outcome in sorted(set(outcomes)):
            places = [i for i, other in enumerate(outcomes) if other == outcome]
            positions = [all_positions[i] for i in places]
            smaller = Part(bucket, positions, np.array(positions), None, part.check)
            kinds = self._kinds
            chosen = {k: [v[i] for i in places] if per_tensor(kinds[k]) else v for k, v in inputs.items()}
            chosen_version = version(outcome)
            chosen = dict(self._inputs_of(smaller, chosen_version.program, chosen))
            yield self._separate(smaller, chosen_version, [grads[i] for i in places], chosen)

    def are_alike(self, parts: Sequence[Part]) -> bool:
        """Whether every predicate has one outcome for all tensors of a step, as far as they share reductions.

        A condition may be a predicate for tensors of one shape, and computed for those of another.
        """
        places: dict[int, tuple[int, ...]] = {}
        known: dict[tuple[int, int], bool] = {}
        for part in parts:
            program = part.bucket.program
            if not program.joins or part.bucket.resident:
                continue
            rule, here = id(program.rule), tuple(place for place, _ in program.predicates)
            if places.setdefault(rule, here) != here:
                return False
            for outcome in set(self._outcomes(part)) if here else ():
                for place, truth in zip(here, outcome, strict=True):
                    if known.setdefault((rule, place), truth) != truth:
                        return False
        return True

    def _outcomes(self, part: Part) -> list[tuple[bool, ...]]:
        bucket = part.bucket
        groups = bucket.groups if part.fired is None else bucket.groups[part.fired]
        facts = bucket.facts if part.positions is None else [bucket.facts[i] for i in part.positions]
        table = ScalarTable.of([node for _, node in bucket.program.predicates])
        chosen = {k: v[groups] for k, v in self.common.hyper.named.items()}
        known = {f: np.array([x[f] for x in facts]) for f in table.facts}
        t = np.asarray(_next_counts(part), np.float64)
        values, _ = table.evaluate((len(groups),), chosen, t, known, {})
        return [tuple(row) for row in (values != 0).tolist()]


def inputs_of(rule: Rule) -> dict[str, InputKind]:
    """The inputs of a rule and of its passes."""
    return {**rule.inputs, **{k: kind for move in rule.moves for k, kind in move.rule.inputs.items()}}


def _next_counts(part: Part) -> Any:
    """The step count `t` of the next update of each fired tensor."""
    numbers = part.bucket.counts.numbers
    return (numbers if part.fired is None else numbers[part.fired]) + 1


def _number(value: Any, name: str) -> float:
    """An input that is one number."""
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise TensorError(f"the input {name!r} must be one number, not {type(value).__name__} {value!r:.80}") from None
