"""Statistics of MLX's optimizers: one vector in the state, so that compiled steps return it, and its values by name.

The vector is float32, as files and GPUs of MLX have no wider numbers. Steps of several compiled functions may write it
by turns. The number of its layout, beside it in the state, names its parameters and statistics.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from zlib import crc32

import mlx.core as mx
import numpy as np

from rulec.compiler.ir import Buffer
from rulec.errors import RulecError
from rulec.functional.plan import Bucket, StepPlan
from rulec.functional.step_values import Statistics
from rulec.language.rule import Rule
from rulec.language.statistics import PREFIX, Watch, joint_place
from rulec.mlx.arrays import LIBRARY, is_traced
from rulec.runtime.statistics import (
    StatisticValues,
    StepStatistics,
    WatchSchedule,
    Words,
    by_rule,
    checked_words,
)

#: The entry of the state for the statistics of the last step that measured them.
MEASURED = "rulec_statistics"


@dataclass(frozen=True)
class VectorPart:
    """The numbers of one statistic of the leaves of a bucket: their places, and with several at each their shapes."""

    name: str
    first: int
    places: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...] | None = None

    @property
    def size(self) -> int:
        """How many numbers there are."""
        return len(self.places) if self.shapes is None else sum(int(np.prod(shape)) for shape in self.shapes)


@dataclass(frozen=True)
class VectorLayout:
    """The parts of a vector of statistics, in order, and the names of all leaves."""

    parts: tuple[VectorPart, ...]
    leaves: tuple[str, ...]

    @classmethod
    def of(cls, plan: StepPlan) -> VectorLayout:
        """The layout of the statistics of a plan."""
        buckets = plan.buckets
        parts = [_part(plan, bucket, buffer) for bucket in buckets for buffer in bucket.program.statistics]
        return cls(tuple(parts), tuple(leaf.name for leaf in plan.leaves))

    @cached_property
    def key(self) -> int:
        """A number that is the same in every process, and with near certainty another for another layout."""
        return crc32(repr(self).encode())

    def vector(self, measured: Statistics) -> Any:
        """The vector of what a step has measured."""
        if not self.parts:
            return mx.zeros(0)
        with mx.stream(mx.cpu):
            return mx.concatenate([measured[part.name][part.first] for part in self.parts]).astype(mx.float32)

    def values(self, vector: Any) -> Iterator[StatisticValues]:
        """The statistics of a vector."""
        begin = 0
        for part in self.parts:
            numbers = vector[begin : begin + part.size]
            yield StatisticValues(part.name, part.places, numbers, LIBRARY, part.shapes)
            begin += part.size


def _part(plan: StepPlan, bucket: Bucket, buffer: Buffer) -> VectorPart:
    name, letters, first = buffer.name.removeprefix(PREFIX), buffer.axes.letters, bucket.places[0]
    if buffer.axes.number and "n" not in letters:
        return VectorPart(name, first, (joint_place(letters),))
    places = tuple(plan.leaves[place].name for place in bucket.places)
    if buffer.axes.number:
        return VectorPart(name, first, places)
    return VectorPart(name, first, places, tuple(bucket.kept_shape(i, buffer.axes) for i in range(len(places))))


@dataclass
class OptimizerStatistics:
    """The statistics of an optimizer: their names, their schedule, and the layouts of their vectors."""

    title: str
    words: Words
    names: Sequence[str]
    schedule: WatchSchedule
    _of_plans: dict[StepPlan, VectorLayout] = field(default_factory=dict)
    _by_key: dict[int, VectorLayout] = field(default_factory=dict)

    @classmethod
    def of(cls, title: str, rules: Sequence[Rule], watch: Watch | None, every: int) -> OptimizerStatistics | None:
        """The statistics that the keywords of an optimizer ask for; None for none.

        HyperError or RuleError for another kind, a statistic that all rules lack, and a mistake in an expression.
        """
        schedule = WatchSchedule.of(title, watch, every)
        if schedule is None:
            return None
        words = checked_words(title, watch)
        watched = by_rule(rules, words).values()
        return cls(title, words, [*dict.fromkeys(name for each in watched for name, _ in each)], schedule)

    def is_due(self, traced: bool) -> bool:
        """Whether the next step measures; RulecError for one that is `traced` where not all do."""
        if traced and self.schedule.every > 1:
            raise RulecError(
                f"watch_every={self.schedule.every} of {self.title} is for steps outside of mx.compile, which repeats "
                f"one step: compile a step with watch and one without, on one state, and call the one that is due"
            )
        return self.schedule.due

    def before_a_step(self, plan: StepPlan) -> dict[str, Any]:
        """The entry of the state before the first step."""
        layout = self._layout(plan)
        size = sum(part.size for part in layout.parts)
        return _entry(mx.full(size, float("nan")), mx.array(0, mx.uint64), layout.key)

    def after_a_step(self, plan: StepPlan, measured: Statistics, count: Any) -> dict[str, Any]:
        """The entry of the state after a step with these statistics; `count` is the number of steps before it."""
        layout = self._layout(plan)
        with mx.stream(mx.cpu):
            step = count.astype(mx.uint64) + 1
        return _entry(layout.vector(measured), step, layout.key)

    def _layout(self, plan: StepPlan) -> VectorLayout:
        if plan not in self._of_plans:
            layout = VectorLayout.of(plan)
            self._of_plans[plan] = self._by_key[layout.key] = layout
        return self._of_plans[plan]

    def shown(self, entry: Mapping[str, Any] | None) -> StepStatistics:
        """The statistics of an entry of the state, which has none of this optimizer before the first step."""
        if entry and is_traced(entry["step"]):
            raise RulecError(f"statistics() of {self.title} inside of mx.compile: call it after the compiled function")
        layout = self._by_key.get(entry["layout"].item()) if entry else None
        step = entry["step"].item() if entry and layout else 0
        measured = [*layout.values(entry["values"])] if entry and layout and step else []
        return StepStatistics(step, measured, self.names, layout.leaves if layout else [], _same, np.array)


def _same(array: Any) -> Any:
    return array


def _entry(values: Any, step: Any, key: int) -> dict[str, Any]:
    return {"values": values, "step": step, "layout": mx.array(key, mx.uint32)}
