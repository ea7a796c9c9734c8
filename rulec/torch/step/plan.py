"""Plans of torch steps: the launches that are the same whenever the same parameters have gradients, and their run.

A run writes parameters and states, increases autograd's version counters, and counts skipped steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.autograd.graph import increment_version

from rulec.language.rule_data import RuleData
from rulec.runtime.buckets.launch import Launch
from rulec.runtime.buckets.scalar_table_device import Scaling
from rulec.runtime.engine import run, was_interrupted
from rulec.torch.fastpath.addresses import StateAddresses
from rulec.torch.fastpath.survey import Survey, survey_of
from rulec.torch.groups.engine import TensorRef, TorchEngine
from rulec.torch.groups.inputs import Inputs
from rulec.torch.groups.routes import Route
from rulec.torch.tensors.dtensor import is_dtensor, local_tensor
from rulec.torch.tensors.fake import plain_memory
from rulec.torch.tensors.sections import Section

#: The number of sets of parameters with gradients with remembered plans.
_PLANS = 1024


@dataclass(frozen=True)
class EngineTensors:
    """One engine's tensors in a step, and the indices of their gradients among the step's (None: all)."""

    engine: TorchEngine
    ids: tuple[int, ...]
    places: list[int] | None


@dataclass(frozen=True)
class StepPlan:
    """A step of some parameters.

    `chosen` are their indices among all parameters, `written` the parameters themselves. `converted` are the indices
    of gradients for which kernels read another tensor: complex gradients and DTensors. `sections` has, for
    each tensor of a kernel, its parameter's index and its section; empty where all are parameters. `tensors` are the
    indices of the kernels' tensors among the routes. `copied` are routes with the contiguous copy that kernels write.
    `scalings` are the ways of scaling of the steps so far, and `later` are the messages of their later rounds.
    """

    shares: list[EngineTensors]
    chosen: Sequence[int]
    written: list[Tensor]
    converted: list[int]
    sections: list[tuple[int, Section | None]]
    tensors: list[int]
    copied: list[tuple[Route, Tensor]]
    scalings: set[tuple[bool, bool]] = field(default_factory=set)
    later: list[Any] = field(default_factory=list)

    @property
    def updated(self) -> list[tuple[Tensor, Section | None]]:
        """Each parameter, or each of its sections."""
        pairs = self.sections or [(place, None) for place in range(len(self.written))]
        return [(self.written[place], section) for place, section in pairs]

    def seen(self, tensors: Sequence[Any]) -> Sequence[Any]:
        """The tensors of kernels, from one tensor for each parameter of the plan."""
        if not self.sections:
            return tensors
        return [tensors[i] if section is None else section.of(tensors[i]) for i, section in self.sections]


class Plans:
    """The plans of an optimizer's steps, by the indices of the parameters with gradients (None: all).

    `tensor_refs` and `copies`, contiguous copies of what kernels see, are by the indices of `routes`. `survey` looks at
    all parameters at once, where steps of one plan follow each other.
    """

    def __init__(
        self, params: Sequence[Tensor], engines: Sequence[TorchEngine], routes: Sequence[Route],
        tensor_refs: Sequence[TensorRef], copies: Mapping[int, Tensor],
    ) -> None:  # fmt: skip
        self._params, self._engines, self._routes, self._tensor_refs = params, engines, routes, tensor_refs
        self._of_param: dict[int, list[int]] = {}
        for i, route in enumerate(routes):
            self._of_param.setdefault(route.place, []).append(i)
        self._copies = copies
        self.known: dict[tuple[int, ...] | None, StepPlan] = {}
        self.survey: Survey | None = None
        self.surveyed: StepPlan | None = None
        #: The addresses of states that the survey looks at.
        self.addresses: StateAddresses | None = None
        self._last: StepPlan | None = None
        #: The number of further surveys that may be made: a plan that changes in every step does without.
        self.surveys_left = 8

    def of(self, present: tuple[int, ...] | None, grads: Sequence[Tensor]) -> StepPlan:
        """The plan for the parameters with some indices, with these gradients."""
        return self.known.get(present) or self.make(present, grads)

    def tensors_of(self, place: int) -> Sequence[int]:
        """The indices among the routes of the tensors of the parameter with this index."""
        return self._of_param[place]

    def follow(
        self, plan: StepPlan, grads: Sequence[Any], launches: Sequence[Launch], lists: Sequence[list[Any]],
        addresses: StateAddresses,
    ) -> None:  # fmt: skip
        """Takes note of a step that asked each gradient: the next step of the plan may survey them.

        A survey looks at the states with these `addresses`, too.
        """
        if plan is self._last:
            self.surveys_left -= 1
            read = {id(grad) for launch in launches for grad in launch.grads}
            if read == {*map(id, map(local_tensor, grads))}:  # else kernels read copies of some
                whole = not (plan.copied or plan.sections or any(p.is_complex() for p in plan.written))
                self.survey = self._survey_of(plan, lists, addresses) if whole else None
                self.surveyed, self.addresses = plan, addresses
        self._last = plan

    def _survey_of(
        self, plan: StepPlan, lists: Sequence[list[Any]], addresses: StateAddresses
    ) -> Survey | None:  # fmt: skip
        """A survey of a plan; None where states are not as they were, or there is none."""
        if not addresses.same():
            return None
        return survey_of(self._params, plan.chosen, plan.written, lists, addresses.all.tensors)

    def make(self, present: tuple[int, ...] | None, grads: Sequence[Tensor]) -> StepPlan:
        """A new plan, kept."""
        chosen = range(len(self._params)) if present is None else present
        written = [self._params[i] for i in chosen]
        if len(self.known) >= _PLANS:
            self.known.clear()
        converted = [place for place, p in enumerate(written) if p.is_complex() or is_dtensor(p)]
        seen = [(place, i) for place, param in enumerate(chosen) for i in self._of_param[param]]
        sections = [(place, self._routes[i].section) for place, i in seen] if len(seen) > len(chosen) else []
        copied = [(self._routes[i], self._copies[i]) for _, i in seen if i in self._copies]
        tensors = [i for _, i in seen]
        shares = self._shares(tensors)
        plan = self.known[present] = StepPlan(shares, chosen, written, converted, sections, tensors, copied)
        return plan

    def _shares(self, seen: Sequence[int]) -> list[EngineTensors]:
        shares = []
        for engine in self._engines:
            of_id = {
                self._tensor_refs[i][1]: place for place, i in enumerate(seen) if self._tensor_refs[i][0] is engine
            }
            if of_id:
                ids = tuple(sorted(of_id))
                places = [of_id[i] for i in ids]
                shares.append(EngineTensors(engine, ids, None if places == [*range(len(seen))] else places))
        return shares


def launches_of(
    plan: StepPlan, grads: Sequence[Tensor], inputs: Inputs | None, scaling: Scaling | None = None
) -> list[Launch]:
    """Every engine's launches for a step, checked; OtherDtype where a gradient's dtype is new."""
    launches: list[Launch] = []
    for share in plan.shares:
        chosen = grads if share.places is None else [grads[i] for i in share.places]
        arguments = None if inputs is None else inputs.of(plan.updated, share.places)
        launches += share.engine.ready(share.ids, chosen, share.engine.table, arguments, scaling)
    return launches


def part_launches_of(
    plan: StepPlan, grads: Sequence[Tensor], way: Callable[[RuleData], RuleData | None], counts: bool,
    inputs: Inputs | None = None,
) -> list[Launch]:  # fmt: skip
    """Every engine's launches for a part of a step: see `Engine.ready_part`."""
    launches: list[Launch] = []
    for share in plan.shares:
        chosen = grads if share.places is None else [grads[i] for i in share.places]
        arguments = None if inputs is None else inputs.of(plan.updated, share.places)
        launches += share.engine.ready_part(share.ids, chosen, share.engine.table, way, counts, arguments)
    return launches


def scaling_kind(scaling: Scaling | None) -> tuple[bool, bool]:
    """Whether steps may be skipped, and gradients are to be unscaled: kernels differ."""
    return scaling is not None, scaling is not None and scaling.scale is not None


def read_all(copied: Iterable[tuple[Route, Tensor]]) -> None:
    """Writes what lies at each route into its copy."""
    with plain_memory():
        for route, copy in copied:
            copy.copy_(route.here)


def write_all(copied: Iterable[tuple[Route, Tensor]]) -> None:
    """Writes each copy where its route lies."""
    with plain_memory():
        for route, copy in copied:
            route.here.copy_(copy)


class Writer:
    """Writes `params` and their states, by the engines at their homes.

    A run of launches between `begin` and `end` is a part of that step. Any other run is a step of its own where the
    engines keep something for its end: `steps` says so. If `skips`, an update may be skipped, and the host knows it
    after the run. `unfinished` is True after an interrupt of a run that had written; where groups have states, from the
    run to the call of `finish`, too.
    """

    def __init__(
        self, params: Sequence[Tensor], engines: Sequence[TorchEngine], tensor_refs: Sequence[TensorRef], steps: bool,
        skips: bool, publishes: bool,
    ) -> None:  # fmt: skip
        self._params, self._engines, self._tensor_refs = params, engines, tensor_refs
        self._steps, self._skips, self._publishes = steps, skips, publishes
        self.unfinished = False
        self._opened = self._counted_skip = False
        self._skipped_updates = self._skipped_steps = 0

    def begin(self) -> None:
        """Opens a step of every engine."""
        for engine in self._engines:
            engine.begin()
        self._opened, self._counted_skip = True, False

    def abandon(self) -> None:
        """Closes the step without new values of groups and of the model."""
        self._opened = False

    def end(self) -> None:
        """Closes the step: values of groups and of the model take their new value."""
        self._opened = False
        for engine in self._engines:
            engine.end()

    def write(self, launches: Sequence[Launch], written: Sequence[Tensor]) -> None:
        """Runs launches of updates of these parameters, and increases autograd's version counters of all of them."""
        try:
            if self._skips:
                self._write_skipping(launches, written)
            else:
                increment_version(written)  # before the kernel: torch's tensors are still in the caches
                self._run(launches)
            self.unfinished = self._publishes
        except BaseException as error:
            self.unfinished = was_interrupted(launches, error)
            raise

    def finish(self) -> None:
        """Ends a step whose groups show their states."""
        self.unfinished = False

    def _run(self, launches: Sequence[Launch]) -> None:
        if self._opened or not self._steps:
            run(launches)
        else:
            self._step(launches)

    def _step(self, launches: Sequence[Launch]) -> None:
        """Runs launches in a step of their own."""
        for engine in self._engines:
            engine.begin()
        try:
            run(launches)
        finally:
            for engine in self._engines:
                engine.end()

    def _write_skipping(self, launches: Sequence[Launch], written: Sequence[Tensor]) -> None:
        """Runs launches whose updates may be skipped, and increases the version counters of updated parameters."""
        buckets = [bucket for engine in self._engines for bucket in engine.buckets.values()]
        before = [bucket.counts.numbers.copy() for bucket in buckets]
        self._run(launches)
        skipped = sum(engine.skipped for engine in self._engines)
        if skipped == self._skipped_updates:
            increment_version(written)
            return
        self._skipped_updates = skipped
        self._skipped_steps += not self._counted_skip
        self._counted_skip = self._opened
        counted = ((b.tensors, old, b.counts.numbers) for b, old in zip(buckets, before, strict=True))
        updated = {id(t) for tensors, *counts in counted for t, i, j in zip(tensors, *counts, strict=True) if i != j}
        tensor_refs = zip(self._params, self._tensor_refs, strict=True)
        increment_version([p for p, (engine, i) in tensor_refs if id(engine.tensors[i]) in updated])

    @property
    def skipped_steps(self) -> int:
        """The number of steps in which a tensor's update was skipped. Waits for devices."""
        on_device = max((engine.device_skips.steps(engine.host) for engine in self._engines), default=0)
        return self._skipped_steps + on_device
