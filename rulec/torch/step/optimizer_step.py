"""The machine of a torch optimizer: an engine for each rule that its groups mean, and the steps of all together.

A machine is built of the groups and states as they are. It is built again when something other than numbers changed:
parameters added, taken out or replaced, another rule, states loaded or edited, another dtype or memory order. States
are copied into the new one's buffers, so nothing is lost. All else is followed at the next step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from itertools import repeat
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from rulec.errors import RulecError, TensorError, interrupted
from rulec.language.rule_data import RuleData
from rulec.runtime.buckets.launch import Launch
from rulec.runtime.buckets.scalar_table_device import Scaling
from rulec.runtime.engine import run
from rulec.runtime.statistics import StepStatistics, measured_together
from rulec.torch.distributed.mesh import ShardRanks, shard_ranks_of
from rulec.torch.fastpath.survey import Survey
from rulec.torch.groups.capture import NEW_NUMBERS, NEW_SCALING, NEW_TENSORS, residence_of
from rulec.torch.groups.engine import GroupNumbers, TensorRef, add_parameters, engines_of, in_order, order_of
from rulec.torch.groups.entries import shared_states
from rulec.torch.groups.inputs import Inputs
from rulec.torch.groups.interface import Interface
from rulec.torch.groups.options import Options, fitting
from rulec.torch.groups.routes import names_of, routes_of
from rulec.torch.groups.values import Groups, GroupStates, check_complete, group_rules_of
from rulec.torch.offload.host_step import HostStep
from rulec.torch.offload.offload import Offload, offload_of
from rulec.torch.states.states import Buffers
from rulec.torch.states.store import Store
from rulec.torch.step.checks import check_parts, check_real
from rulec.torch.step.description import Alike
from rulec.torch.step.plan import (
    Plans,
    StepPlan,
    Writer,
    launches_of,
    part_launches_of,
    read_all,
    scaling_kind,
    write_all,
)
from rulec.torch.step.ranks import with_ranks
from rulec.torch.step.repeat import Repeat, repeat_of
from rulec.torch.step.snapshot import Change, Snapshot
from rulec.torch.step.sparse import SparseRows, check_takes_rows, is_sparse, sparse_rows
from rulec.torch.tensors.dtensor import check_gradient, is_dtensor, local_tensor
from rulec.torch.tensors.fake import plain_arithmetic, plain_memory
from rulec.torch.tensors.library import as_tensor, numbers_on_host
from rulec.torch.tensors.tensors import (
    OtherDtype,
    TorchArrays,
    check_conforms,
    dtype_name,
    is_dense,
    real_gradient,
    real_view,
)

_gradient = attrgetter("grad")


class OptimizerStep:
    """The step of an optimizer: the engines over the parameters of some groups; kernels write the states in `buffers`.

    Raises HyperError, TensorError, StateMismatch or BackendUnavailable, and then nothing was changed. Where `strict`,
    a parameter's saved state must have everything its rule needs; otherwise what is missing starts afresh.
    """

    def __init__(
        self, interface: Interface, groups: Groups, saved: Mapping[Any, Any], options: Options, strict: bool = False
    ) -> None:
        self.interface = interface
        self.group_rules = group_rules_of(interface, groups)
        self.params: list[Tensor] = [p for group in groups for p in group["params"]]
        options = fitting(options, self.params)
        self.routes = routes_of(interface, self.group_rules, groups, options.across is not None)
        order = order_of(options.order, len(self.routes))
        routed = [(self.routes[place].param, self.routes[place].rule) for place in order]
        options = with_ranks(options, routed, groups, interface.name)
        self.options, self._together = options, options.processes
        self.names = names_of(groups)
        check_parts(options, self.routes)
        check_real(options, self.params, self.names)
        self.capture_mode = residence_of(self.params, groups, options)
        self.capture_mode.check_capture(NEW_TENSORS)
        self._snapshot = Snapshot(interface, groups, options, self.capture_mode, self.names)
        #: The transfers of the step, where it is offloaded.
        self.offload = None if options.offload is None else offload_of(self.routes, options.offload, options.weights)
        #: Whether kernels read and write the parameters themselves.
        self._in_place = self.offload is None or self.offload.in_place
        arrays = TorchArrays() if self.offload is None else self.offload.arrays
        self.engines = engines_of(interface, self.group_rules, groups, options, self.capture_mode, arrays)
        self.engines = in_order(self.engines, [self.routes[place].group for place in order])
        tensors = [route.here for route in self.routes] if self.offload is None else self.offload.mirrors
        self.tensor_refs = add_parameters(self.engines, self.group_rules, self.routes, order, tensors)
        if self.offload is not None:
            self.offload.attach(self.tensor_refs)
        #: The description that other ranks must have too, where there are DTensors.
        self.alike = (
            Alike(self.routes, self.tensor_refs, order, groups, options) if any(map(is_dtensor, self.params)) else None
        )
        routed_homes = zip(self.routes, self.tensor_refs, strict=True)
        #: The ranks with shards of each tensor whose statistics they complete together, by its identity.
        self._shard_ranks = {} if options.totals is None else self._ranks_of_tensors()
        whole = {route.place: tensor_ref for route, tensor_ref in routed_homes if route.section is None}
        #: The references of parameters that can be updated apart from steps here, by index.
        self._whole = whole if self.offload is None else {}
        self._copies = self._make_copies() if self._in_place else {}
        self.plans = Plans(self.params, self.engines, self.routes, self.tensor_refs, self._copies)
        device_skips = self.capture_mode.there and interface.skips
        steps, skips = bool(interface.shared) or device_skips, interface.skips and not self.capture_mode.there
        remembers = bool(interface.shared and self.engines)
        written = [route.param for route in self.routes]
        self.writer = Writer(written, self.engines, self.tensor_refs, steps, skips, remembers)
        self._group_states = GroupStates(interface.shared, self.engines[0]) if remembers else None
        self.buffers = Buffers(self.engines, self.routes, self.tensor_refs, Store(saved), groups)
        #: The repetition that takes the next step, where it is as the last one.
        self.repeat: Repeat | None = None
        more = interface.inputs or interface.passes.count or interface.evaluates or interface.skips or options.processes
        more = more or self.offload is not None
        more = more or (options.totals is not None and options.schedule is not None and options.schedule.every == 1)
        self._repeats = not (more or steps or skips or remembers)
        #: The statistics from before this machine was built, until it measures some.
        self._earlier: StepStatistics | None = None
        self._restore(saved, groups, strict)

    def _ranks_of_tensors(self) -> dict[int, ShardRanks]:
        ranks = shard_ranks_of(self.params)
        routed = zip(self.routes, self.tensor_refs, strict=True)
        known = {id(engine.tensors[i]): ranks.get(id(route.param)) for route, (engine, i) in routed}
        return {key: each for key, each in known.items() if each is not None}

    def _make_copies(self) -> dict[int, Tensor]:
        """Contiguous copies of parameters with gaps in memory, or with rules that need rows and columns there."""
        copies = {}
        for place, (engine, tensor_id) in enumerate(self.tensor_refs):
            here = self.routes[place].here
            if not is_dense(here) or engine.needs_copy(tensor_id, engine.table):
                with plain_memory():
                    copies[place] = here.contiguous()
                engine.replace(tensor_id, copies[place])
        return copies

    def _restore(self, saved: Mapping[Any, Any], groups: Groups, strict: bool) -> None:
        """Allocates the states that must exist before the first step, and takes over the saved ones."""
        values = self.buffers.prepare(saved, self.interface.full_at_once, strict)
        if strict and values:
            check_complete(shared_states([self.routes[place].rule for place in values]), groups)
        if self._group_states is not None:
            self._group_states.read(groups)
        self.buffers.fill(values)
        self.buffers.show()

    def make_states(self, groups: Sequence[dict[str, Any]]) -> None:
        """Allocates the states of every parameter that has a gradient, as before its first update."""
        with self.plain():
            read_all((self.routes[i], copy) for i, copy in self._copies.items())
            self.buffers.begin({param for param in self.params if param.grad is not None})
            self.buffers.show()
        if self._group_states is not None:
            self._group_states.publish(groups)

    # Changes between steps

    def stale(self, groups: Groups, state: Any) -> bool:
        """Whether a machine must be built anew before a step of these groups with this state."""
        self.check_whole()
        store, self.repeat = self.buffers.store, None
        if state is not store or store.edits.changed:
            return True
        addresses, survey = self.buffers.addresses, self.plans.survey
        if survey is not None and self.plans.addresses is not addresses:  # it knows other states
            self.plans.survey = survey = None
        changes = self._snapshot.changes(groups, survey)
        surveyed = survey is not None and survey.fresh
        if not (surveyed or addresses.same() or self._follow_states()):
            return True
        return bool(changes) and not self._follow(changes, groups)

    def is_as_before(self) -> bool:
        """Whether parameters, states and gradients are as at the last survey, but for gradients at new addresses."""
        survey = self.plans.survey
        same = survey is not None and survey.look(survey.lists)
        if survey is not None:
            survey.release()
        return same

    def check_whole(self) -> None:
        """PartialUpdate, once, where the last step was interrupted while it wrote."""
        repeat = self.repeat
        if not self.writer.unfinished and (repeat is None or not repeat.unfinished):
            return
        self.repeat = None
        self.writer.finish()
        raise interrupted(self.interface.name)

    def _follow(self, changes: Collection[Change], groups: Groups) -> bool:
        """Takes over changes; False where a machine must be built anew."""
        if Change.PARAMETERS in changes or (Change.MEMORY in changes and not self._follow_memory()):
            return False
        if Change.VALUES in changes:
            if not self._snapshot.take_values(groups, self.group_rules):
                return False
            for engine in self.engines:
                engine.take_numbers(groups, self.capture_mode)
            if self.alike is not None and self.options.coordinator is not None:
                self.alike.take_numbers()
        return True

    def _follow_states(self) -> bool:
        """Takes over states whose memory moved; False where more than their address is new."""
        self.capture_mode.check_capture(NEW_TENSORS)
        self.repeat = self.plans.survey = None
        return self.buffers.follow()

    def _follow_memory(self) -> bool:
        """Takes over parameters whose memory moved; False where more than their address is new."""
        self.repeat = None
        if self._snapshot.altered() is not None:
            return False
        moved = {*self._snapshot.take_memory()}
        for i, (route, (engine, tensor_id)) in enumerate(zip(self.routes, self.tensor_refs, strict=True)):
            if route.place in moved and i not in self._copies and self._in_place:
                engine.replace(tensor_id, route.here)
        return True

    def release(self) -> None:
        """Drops the survey's references to parameters and gradients."""
        if self.plans.survey is not None and self.plans.survey.fresh:
            self.plans.survey.release()

    def tensor_ref(self, place: int) -> TensorRef | None:
        """The tensor reference of a parameter, by index.

        None for one whose sections have references of their own, and where a step is offloaded.
        """
        return self._whole.get(place)

    # Steps

    def step(
        self, groups: Sequence[dict[str, Any]], inputs: Inputs | None = None, scaling: Scaling | None = None
    ) -> bool:
        """One step of every parameter that has a gradient. False, and nothing done, where a gradient's dtype is new.

        `scaling` is how gradients were scaled, where the capture mode allows it.
        """
        casting = [*filter(torch.is_autocast_enabled, self.capture_mode.types)]
        # Tensors made on the device, and views of transfer buffers, may be written in later steps.
        kept = self.capture_mode.there or self.offload is not None
        if casting or (kept and torch.is_inference_mode_enabled()):
            with plain_arithmetic(casting):
                return self._step(groups, inputs, scaling)
        return self._step(groups, inputs, scaling)

    def _step(self, groups: Sequence[dict[str, Any]], inputs: Inputs | None, scaling: Scaling | None) -> bool:
        done = False
        self._begin_statistics()
        try:
            done = self._step_plainly(groups, inputs, scaling)
            if done:
                self._complete()
        finally:
            self._end_statistics(done)
        return done

    # Statistics

    def _complete(self) -> None:
        """Sends the statistics of shards in this step to the ranks that complete them."""
        totals, schedule = self.options.totals, self.options.schedule
        if totals is not None and schedule is not None:
            totals.send(schedule.steps, [engine.statistics for engine in self.engines], self._shard_ranks)

    def _begin_statistics(self) -> None:
        """Begins a step, which measures statistics in its turn."""
        if self.options.schedule is not None:
            for engine in self.engines:
                engine.statistics.begin(self.options.schedule.due)

    def _end_statistics(self, taken: bool) -> None:
        """Ends a step: counts it where it was taken; else the statistics of the last one are there again."""
        schedule = self.options.schedule
        if schedule is None:
            return
        if taken:
            self._earlier = None if schedule.due else self._earlier
            schedule.advance()
            return
        for engine in self.engines:
            engine.statistics.take_back()

    def keep_statistics(self, before: OptimizerStep) -> None:
        """Takes over the statistics of the machine before this one; none where its ranks did not take one step."""
        if self.options.schedule is not None:
            with suppress(RulecError):
                self._earlier = before.statistics()

    def statistics(self) -> StepStatistics:
        """The statistics of the last step that measured them."""
        if self._earlier is not None:
            return self._earlier
        measured = measured_together([(e.statistics, e.indices.__getitem__) for e in self.engines])
        names = dict.fromkeys(name for engine in self.engines for name in engine.statistics.names)
        places, schedule = [route.name for route in self.routes], self.options.schedule
        step = 0 if schedule is None else schedule.last
        return StepStatistics(step, measured, [*names], places, as_tensor, numbers_on_host)

    def _step_plainly(
        self, groups: Sequence[dict[str, Any]], inputs: Inputs | None, scaling: Scaling | None
    ) -> bool:  # fmt: skip
        survey = self.plans.survey
        plan: StepPlan | None
        grads: Sequence[Any]
        if survey is not None and survey.fresh:
            plan, grads, present = self.plans.surveyed, survey.grads, None
        else:
            survey, (present, grads) = None, self._gradients()
            plan = self.plans.known.get(present)
        if self.capture_mode.there:
            self._check_capture(groups, plan, scaling)
        if plan is None:
            plan = self.plans.make(present, grads)
        if self._group_states is not None:
            self._group_states.read(groups)
        launches = self._write(plan, grads, inputs, scaling, survey=survey)
        if launches is None:
            return False
        schedule = self.options.schedule
        if schedule is not None and schedule.due and schedule.every > 1:
            pass  # the launches are not those of the next step
        elif survey is None and self.plans.surveys_left and self.offload is None:
            self.plans.follow(plan, grads, launches, self._snapshot.lists, self.buffers.addresses)
        elif survey is not None and inputs is None and scaling is None and self._repeats:
            numbers = GroupNumbers(groups, self.interface, self.engines, self._snapshot.doubt)
            self.repeat = repeat_of(plan, survey, groups, numbers, self.buffers.store, launches, self.capture_mode)
        if self._group_states is not None:
            self._group_states.publish(groups)
            self.writer.finish()
        if self.capture_mode.there:
            plan.scalings.add(scaling_kind(scaling))
        return True

    def _gradients(self) -> tuple[tuple[int, ...] | None, list[Any]]:
        """The gradients, and the indices of their parameters (None: all)."""
        grads: list[Any] = [*map(_gradient, self.params)]
        if not any(map(is_, grads, repeat(None))):
            return None, grads
        return tuple([i for i, g in enumerate(grads) if g is not None]), [g for g in grads if g is not None]

    def _write(
        self, plan: StepPlan, grads: Sequence[Any], inputs: Inputs | None, scaling: Scaling | None, meets: bool = True,
        survey: Survey | None = None, arrived: bool = False,
    ) -> list[Launch] | None:  # fmt: skip
        """Updates a plan's parameters with these gradients. Returns the launches.

        None, and nothing done, where a gradient's dtype is new. With a `survey` the gradients are its own. Where they
        have `arrived`, they are in host memory, as kernels read them.
        """
        if survey is None and self.interface.takes_rows and any(map(is_sparse, grads)):
            if self.offload is not None:
                name = self.names[plan.chosen[next(i for i, grad in enumerate(grads) if is_sparse(grad))]]
                raise TensorError(
                    f"the gradient of {name} is sparse, and offload moves whole gradients: make its layer with "
                    f"sparse=False, or leave offload out"
                )
            return self._write_sparse(plan, grads, scaling)
        if plan.converted and survey is None and not arrived:
            grads = self._converted(plan, grads)
        if plan.copied:
            read_all(plan.copied)
        if plan.sections:
            self._check_shapes(plan, grads)
            grads = [*plan.seen(grads)]
        try:
            launches = self._launches(plan, grads, inputs, scaling, arrived)
        except OtherDtype:
            return None
        if meets and self.options.across is not None and not self.options.across.agreed:
            overflowed = scaling is not None and bool(scaling.found_inf)
            self.options.across.agree(launches, len(self._snapshot.sizes), bool(self.interface.shared), overflowed)
        if meets and self.options.coordinator is not None:
            try:
                self.options.coordinator.begin(plan, launches, scaling, self.options.across is not None, self.alike)
            except RulecError as error:
                raise self._told(error) from error.__cause__
        try:
            self.writer.write(launches, plan.written)
        finally:
            if plan.copied:
                write_all(plan.copied)
            if self.offload is not None:
                self.offload.finish(plan.tensors)
            for processes in self._together if meets else ():
                processes.leave()
        if [1 for engine in self.engines if engine.published != engine.extensions]:
            self.buffers.show()
        return launches

    def _launches(
        self, plan: StepPlan, grads: Sequence[Any], inputs: Inputs | None, scaling: Scaling | None, arrived: bool
    ) -> list[Launch]:
        """The launches of a step, here or on the host."""
        if self.offload is None:
            return launches_of(plan, grads, inputs, scaling)
        numbers = None if inputs is None else inputs.of(plan.updated, None)
        if isinstance(self.offload, HostStep):
            return self.offload.launches(plan.tensors, grads, numbers, arrived)
        return self.offload.launches(plan.tensors, grads, numbers)

    def _converted(self, plan: StepPlan, grads: Sequence[Any]) -> list[Tensor]:
        """The gradients as kernels read them: pairs for complex ones, and local tensors of DTensors."""
        grads = [*grads]
        for place in plan.converted:
            name = self.names[plan.chosen[place]]
            check_gradient(grads[place], plan.written[place], name)
            here = local_tensor(grads[place])
            grads[place] = real_gradient(here, name) if here.is_complex() else here
        return grads

    def _real_gradients(self, plan: StepPlan, grads: Sequence[Tensor]) -> list[Tensor]:
        """The gradients of a plan's parameters as kernels read them, where all may be converted."""
        return [real_gradient(grad, self.names[i]) for grad, i in zip(grads, plan.chosen, strict=True)]

    def _told(self, error: RulecError) -> Exception:
        """Reports an error of ranks with shards of the same tensors to the waiting ranks of `reduce_over`."""
        return error if self.options.across is None else self.options.across.fail(error, ())

    def _write_sparse(
        self, plan: StepPlan, grads: Sequence[Tensor], scaling: Scaling | None
    ) -> list[Launch] | None:  # fmt: skip
        """The same, where some gradients are sparse: their rows are updated, the other rows stay as they are."""
        sparse = [place for place, grad in enumerate(grads) if is_sparse(grad)]
        dense = [place for place in range(len(grads)) if place not in set(sparse)]
        chosen = [plan.chosen[place] for place in dense]
        try:
            rows = [self._rows(plan, place, grads[place], scaling) for place in sparse]
            launches = [launch for tensor_ref, each in rows for launch in each.launches(tensor_ref)]
            whole = self.plans.of(tuple(chosen), [grads[place] for place in dense]) if dense else None
        except OtherDtype:
            return None
        if whole is not None:
            if whole.converted or whole.copied or whole.sections:
                raise TensorError("sparse gradients and complex, split or strided parameters cannot be in one step")
            launches += launches_of(whole, [grads[place] for place in dense], None, scaling)
        try:
            self.writer.write(launches, plan.written)
        finally:
            for _, each in rows:
                each.put_back()
        self.buffers.show()
        return launches

    def _rows(self, plan: StepPlan, place: int, grad: Tensor, scaling: Scaling | None) -> tuple[TensorRef, SparseRows]:
        """The rows of a sparse gradient, and the home of its parameter. TensorError where rows alone cannot be updated.

        The parameter's states are allocated where they are not there yet.
        """
        param, chosen = plan.written[place], plan.chosen[place]
        tensor_ref, name = self.tensor_ref(chosen), self.names[chosen]
        route = next(route for route in self.routes if route.place == chosen)
        if (
            tensor_ref is None
            or is_dtensor(param)
            or param.is_complex()
            or scaling is not None
            or self.options.processes
        ):
            raise TensorError(
                f"the gradient of {name} is sparse, and its parameter is complex or split, its gradient scaled, or its "
                f"step offloaded or one with other processes: make its layer with sparse=False"
            )
        check_takes_rows(self.group_rules[route.group], name)
        engine, tensor_id = tensor_ref
        engine.take_table(engine.table)
        engine.prepare([tensor_id], [dtype_name(grad.dtype)], engine.table)
        return tensor_ref, sparse_rows(tensor_ref, param, grad, name)

    def _check_shapes(self, plan: StepPlan, grads: Sequence[Tensor]) -> None:
        """TensorError where a gradient of a fused parameter cannot be cut as its parameter is."""
        for place in {place for place, section in plan.sections if section is not None}:
            grad, param, name = grads[place], local_tensor(plan.written[place]), self.names[plan.chosen[place]]
            if grad.layout is not torch.strided:
                raise TensorError(f"the gradient of {name} is sparse ({grad.layout}), and its parameter is split")
            if grad.shape != param.shape:
                raise TensorError(
                    f"the gradient of {name} has shape {tuple(grad.shape)}, its parameter {tuple(param.shape)}"
                )

    def _check_capture(self, groups: Groups, plan: StepPlan | None, scaling: Scaling | None) -> None:
        """RulecError where a captured step does more than the steps after it."""
        if not self.capture_mode.capturing:
            return
        if self.options.across is not None:
            raise RulecError("a step with reduce_over waits for other processes, and cannot be captured")
        if self.options.coordinator is not None:
            raise RulecError("a step that reduces DTensors waits for other processes, and cannot be captured")
        if self.options.schedule is not None and self.options.schedule.every > 1:
            raise RulecError(
                f"a step with watch_every={self.options.schedule.every} cannot be captured in a CUDA graph, which "
                f"measures each time it runs or never: give watch_every=1"
            )
        changed = self._group_states is not None and self._group_states.changed(groups)
        self.capture_mode.check_capture(
            NEW_TENSORS if plan is None else NEW_NUMBERS if changed else
            "" if scaling_kind(scaling) in plan.scalings else NEW_SCALING
        )  # fmt: skip

    # Passes of a step

    def wants(self, params: Collection[Tensor], place: int) -> bool:
        """Whether any of these parameters has the evaluation with this index in its next step."""
        chosen = {*params}
        ids: dict[int, list[int]] = {}
        for route, (engine, tensor_id) in zip(self.routes, self.tensor_refs, strict=True):
            if route.param in chosen:
                ids.setdefault(id(engine), []).append(tensor_id)
        return any(engine.wants(ids.get(id(engine), ()), place, engine.table) for engine in self.engines)

    def maximized(self) -> set[Tensor]:
        """The parameters whose gradient is gone up."""
        return {route.param for route in self.routes if self.group_rules[route.group].maximize}

    def move(
        self, way: Callable[[RuleData], RuleData | None], inputs: Inputs, ready: Callable[[Mapping[Any, Any]], None]
    ) -> None:
        """Moves the parameters with gradients to the point of a pass: see `Engine.ready_part`.

        `ready` is called with the states by parameter, once these are there and before anything is written. OtherDtype,
        and nothing done, where a gradient's dtype is new.
        """
        grads = [p.grad for p in self.params if p.grad is not None]
        places = tuple(i for i, p in enumerate(self.params) if p.grad is not None)
        with self.plain():
            plan = self.plans.of(places, grads)
            for place in plan.converted:
                check_gradient(grads[place], plan.written[place], self.names[plan.chosen[place]])
            self._check_shapes(plan, grads)
            read_all(plan.copied)
            seen = plan.seen(self._real_gradients(plan, grads))
            launches = part_launches_of(plan, seen, way, False, inputs)
            self.buffers.show()
            ready(self.buffers.store)
            self.writer.write(launches, plan.written)
            write_all(plan.copied)

    def change(self, way: Callable[[RuleData], RuleData | None]) -> None:
        """One step of another rule on the same parameters and states; parameters without states stay as they are."""
        if self.capture_mode.capturing:
            raise RulecError("eval() and train() cannot be captured in a CUDA graph: call them before or after it")
        written = [p for p in self.params if self.buffers.store.get(p)]
        if self.offload is not None:
            self._change_elsewhere(self.offload, way, written)
            return
        copied = [(self.routes[i], copy) for i, copy in self._copies.items()]
        read_all(copied)
        increment_version(written)
        for engine in self.engines:
            engine.change(way, engine.table)
        write_all(copied)

    def _change_elsewhere(
        self, offload: Offload, way: Callable[[RuleData], RuleData | None], written: Sequence[Tensor]
    ) -> None:
        """The same where states lie on the host."""
        copied = [(self.routes[i], copy) for i, copy in self._copies.items()]
        with self.plain():
            read_all(copied)
            changes = offload.changes(way)  # it tells by the versions what others have written
            increment_version(written)
            try:
                for launches in changes:
                    run(launches)
            finally:
                offload.finish(range(len(self.routes)))
            write_all(copied)

    # Steps of some parameters after others

    def begin(self, groups: Groups) -> None:
        """Opens a step in which parameters `fire` one after the other, with the groups' numbers of now."""
        if self.capture_mode.capturing:
            raise RulecError("updates inside the backward pass cannot be captured in a CUDA graph: use a plain step")
        self.forget_early()
        if self._group_states is not None:
            self._group_states.read(groups)
        if self.options.schedule is not None:
            for engine in self.engines:
                engine.statistics.check_apart("a backward pass that updates")
            if self.options.totals is not None:
                self.options.totals.open(self.options.schedule.due)
        self._begin_statistics()
        self.writer.begin()

    def forget_early(self) -> None:
        """Drops the stages that have run early."""
        if isinstance(self.offload, HostStep):
            self.offload.early.forget()

    def end(self, groups: Sequence[dict[str, Any]], taken: bool = True) -> None:
        """Closes the step: values of groups and of the model take their new value. It counts where it was `taken`."""
        self.forget_early()
        self.writer.end()
        if taken and self.options.schedule is not None:
            self._complete()
        self._end_statistics(taken)
        if self._group_states is not None:
            self._group_states.publish(groups)
            self.writer.finish()

    def fire(
        self, places: tuple[int, ...], grads: Sequence[Tensor], meets: bool = False, arrived: bool = False
    ) -> bool:  # fmt: skip
        """Updates the parameters with these indices, in order, in the open step.

        False, and nothing done, where a gradient's dtype is new. The bits are those of one step of all parameters.
        `meets` says that ranks with other shards of the parameters do so too. Gradients that have `arrived` are in host
        memory, as kernels read them.
        """
        self.check_undisturbed(places)
        with self.plain():
            plan = self.plans.of(places, grads)
            return self._write(plan, [*grads], None, None, meets, arrived=arrived) is not None

    def conforming(self, place: int, grad: Any) -> Tensor:
        """The gradient of the parameter with this index as kernels read it; TensorError where it does not fit."""
        check_gradient(grad, self.params[place], self.names[place])
        here = real_gradient(grad, self.names[place])
        check_conforms(here, real_view(self.params[place]), self.names[place])
        return here

    def begin_early(self, gradients: Mapping[int, Tensor], comes: Callable[[int], bool]) -> None:
        """Runs stages of the open step that need the gradients on the host so far: see `rulec.torch.offload.early`.

        `gradients` are by the index of their parameter, and `comes` says of an index whether one is still to come.
        """
        assert isinstance(self.offload, HostStep)
        places = [i for i, route in enumerate(self.routes) if route.place in gradients]
        sections = [(self.routes[i].section, gradients[self.routes[i].place]) for i in places]
        seen = [grad if section is None else section.of(grad) for section, grad in sections]
        try:
            self.check_undisturbed((*gradients,))
            with self.plain():
                self.offload.begin(dict(zip(places, seen, strict=True)), lambda i: comes(self.routes[i].place))
        except RulecError:
            self.offload.early.forget()

    def announce(self, place: int) -> None:
        """Increases the version of a parameter that is about to be updated on the host."""
        assert isinstance(self.offload, HostStep)
        self.offload.announce(self.plans.tensors_of(place), self.params[place])

    def fire_part(
        self, places: tuple[int, ...], grads: Sequence[Tensor], way: Callable[[RuleData], RuleData], counts: bool
    ) -> None:  # fmt: skip
        """Runs a part of the step on the parameters with these indices: see `Engine.ready_part`."""
        self.check_undisturbed(places)
        with plain_arithmetic([*filter(torch.is_autocast_enabled, self.capture_mode.types)]):
            plan = self.plans.of(places, grads)
            seen = plan.seen(self._real_gradients(plan, grads))
            read_all(plan.copied)
            if self.offload is None:
                self.writer.write(part_launches_of(plan, seen, way, counts), plan.written)
            else:
                self._write_part(self.offload, plan, self.offload.parts(plan.tensors, seen, way, counts))
            write_all(plan.copied)
        self.buffers.show()

    def _write_part(self, offload: Offload, plan: StepPlan, launches: Sequence[Launch]) -> None:
        """Writes a part of a step whose states lie on the host."""
        try:
            self.writer.write(launches, plan.written)
        finally:
            offload.finish(plan.tensors)

    def fire_launches(self, launches: Sequence[Launch], written: Sequence[Tensor]) -> None:
        """Updates parameters by launches that make the gradients themselves."""
        with self.plain():
            self.writer.write(launches, written)
        if any(engine.published != engine.extensions for engine in self.engines):
            self.buffers.show()

    def plain(self) -> AbstractContextManager[Any]:
        """A block of arithmetic as kernels need it: without autocast, and without inference mode on a device."""
        casting = [*filter(torch.is_autocast_enabled, self.capture_mode.types)]
        kept = self.capture_mode.there or self.offload is not None
        return plain_arithmetic(casting) if casting or kept else nullcontext()

    def check_undisturbed(self, places: Sequence[int]) -> None:
        """Takes over parameters whose memory moved; RulecError for any other change since the step was opened."""
        edited = self.buffers.store.edits.changed
        if edited or not (self.buffers.addresses.same(tuple(places)) or self._follow_states()):
            raise RulecError(
                "the optimizer's state was changed in the middle of a step: change it before, or after step()"
            )
        if self._snapshot.moved(places) and not self._follow_memory():
            altered = self._snapshot.altered()
            assert altered is not None
            raise RulecError(
                f"{self.names[altered]} was given another shape, dtype or device in the middle of a step: do that "
                f"before, or after step()"
            )
