"""The values that all buckets of one step share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias

import numpy as np

from rulec.functional.plan import StepPlan
from rulec.functional.values import Hypers, PureLibrary, Values
from rulec.runtime.buckets.reductions import Processes

#: The statistics of a step: name -> place of a leaf -> value.
Statistics: TypeAlias = dict[str, dict[int, Any]]


class StepValues:
    """The values that the buckets of one step share.

    `params` may be gradients where the plan does not read parameters. `inputs` has a number, or an array for each leaf.
    `numbers` are the leaves' numbers in the seeds of random numbers, by default their places.
    """

    #: The context in which elements are computed, for a framework that must be told their device.
    on_device: Callable[[], AbstractContextManager[object]] = nullcontext

    def __init__(
        self, plan: StepPlan, params: Sequence[Any], grads: Sequence[Any], values: Values, hyper: Hypers,
        inputs: Mapping[str, Any], numbers: Sequence[Any] | None, library: PureLibrary,
    ) -> None:  # fmt: skip
        self.plan, self.params, self.grads = plan, params, grads
        self.old, self.new, self.hyper, self.inputs = values, values.copied(), hyper, inputs
        self.results: dict[int, Any] = {}
        self.numbers: Sequence[Any] = range(len(plan.leaves)) if numbers is None else numbers
        self.library = library
        self.t = library.cast(values.count, "float64") + 1
        self.skip_masks: dict[int, Any] = {}
        #: The value of a leaf may be that of its group or model.
        self.statistics: Statistics = {}
        self.processes = Processes()

    def result(self, place: int) -> Any:
        """The result of a leaf so far: before any, its parameter, or zero with `Options.update`."""
        if place in self.results:
            return self.results[place]
        return self.library.of.xp.zeros_like(self.params[place]) if self.plan.options.update else self.params[place]

    def counted(self) -> Any:
        """The counts after the step: one for all leaves, or one for each."""
        old = self.old.count
        # It stays at the largest number there is rather than start again below zero.
        more = self.library.where(old < np.iinfo(np.int32).max, old + 1, old)
        if not self.skip_masks:
            return more
        if not self.plan.own_counts:
            return self.library.where(next(iter(self.skip_masks.values())), old, more)
        skip_masks = [self.skip_masks.get(place, False) for place in range(len(self.plan.leaves))]
        return self.library.where(self.library.of.xp.stack([self.library.numbers(x) for x in skip_masks]), old, more)
