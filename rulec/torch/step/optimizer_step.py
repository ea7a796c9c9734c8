"""The machine of a torch optimizer: the steps of all its tensors together, or of some parameters after others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rulec.errors import RulecError, TensorError
from rulec.language.rule_data import RuleData
from rulec.runtime.buckets.launch import Launch
from rulec.runtime.buckets.scalar_table_device import Scaling
from rulec.torch.fastpath.survey import Survey
from rulec.torch.groups.capture import NEW_NUMBERS, NEW_SCALING, NEW_TENSORS
from rulec.torch.groups.engine import GroupNumbers
from rulec.torch.groups.inputs import Inputs
from rulec.torch.groups.interface import Interface
from rulec.torch.groups.options import Options
from rulec.torch.groups.values import Groups
from rulec.torch.offload.host_step import HostStep
from rulec.torch.offload.offload import Offload
from rulec.torch.step.gradients import (
    check_shapes,
    converted_gradients,
    is_sparse,
    launches_of_rows,
    present_gradients,
    real_gradients,
)
from rulec.torch.step.plan import StepPlan, launches_of, part_launches_of, read_all, scaling_kind, write_all
from rulec.torch.step.repeat import repeat_of
from rulec.torch.step.tensors import StepTensors
from rulec.torch.tensors.fake import plain_arithmetic
from rulec.torch.tensors.tensors import OtherDtype


class OptimizerStep(StepTensors):
    """The step of an optimizer over the parameters of some groups; its kernels write the states in `buffers`."""

    def __init__(
        self, interface: Interface, groups: Groups, saved: Mapping[Any, Any], options: Options, strict: bool = False
    ) -> None:
        super().__init__(interface, groups, saved, options, strict)
        self._together, schedule = self.options.processes, self.options.schedule
        completes = self.options.reducer is not None and schedule is not None and schedule.every == 1
        more = (interface.inputs, interface.passes.count, interface.evaluates, interface.skips, interface.shared)
        #: Whether a step may be repeated: it does no more than its kernels.
        self._repeats = not (any(more) or self._together or self.offload is not None or completes)

    def step(
        self, groups: Sequence[dict[str, Any]], inputs: Inputs | None = None, scaling: Scaling | None = None
    ) -> bool:
        """One step of every parameter that has a gradient. False, and nothing done, where a gradient's dtype is new.

        `scaling` is how gradients were scaled, where the capture mode allows it.
        """
        casting = [*filter(torch.is_autocast_enabled, self.capture_mode.types)]
        # Tensors made on the device, and views of transfer buffers, may be written in later steps.
        kept = self.capture_mode.on_device or self.offload is not None
        if casting or (kept and torch.is_inference_mode_enabled()):
            with plain_arithmetic(casting):
                return self._step(groups, inputs, scaling)
        return self._step(groups, inputs, scaling)

    def _step(self, groups: Sequence[dict[str, Any]], inputs: Inputs | None, scaling: Scaling | None) -> bool:
        done = False
        self.measurements.begin()
        try:
            done = self._step_plainly(groups, inputs, scaling)
            if done:
                self.measurements.complete()
        finally:
            self.measurements.end(done)
        return done

    def _step_plainly(
        self, groups: Sequence[dict[str, Any]], inputs: Inputs | None, scaling: Scaling | None
    ) -> bool:  # fmt: skip
        survey = self.plans.survey
        plan: StepPlan | None
        grads: Sequence[Any]
        if survey is not None and survey.fresh:
            plan, grads, present = self.plans.surveyed, survey.grads, None
        else:
            survey, (present, grads) = None, present_gradients(self.params)
            plan = self.plans.known.get(present)
        if self.capture_mode.on_device:
            self._check_capture(groups, plan, scaling)
        if plan is None:
            plan = self.plans.make(present, grads)
        if self.group_states is not None:
            self.group_states.read(groups)
        launches = self._write(plan, grads, inputs, scaling, survey=survey)
        if launches is None:
            return False
        if self.measurements.is_next_apart:
            pass  # the launches are not those of the next step
        elif survey is None and self.plans.surveys_left and self.offload is None:
            self.plans.follow(plan, grads, launches, self.snapshot.lists, self.buffers.addresses)
        elif survey is not None and inputs is None and scaling is None and self._repeats:
            numbers = GroupNumbers(groups, self.interface, self.engines, self.snapshot.doubt)
            self.repeat = repeat_of(plan, survey, groups, numbers, self.buffers.store, launches, self.capture_mode)
        if self.group_states is not None:
            self.group_states.publish(groups)
            self.writer.finish()
        if self.capture_mode.on_device:
            plan.scalings.add(scaling_kind(scaling))
        return True

    def _write(
        self, plan: StepPlan, grads: Sequence[Any], inputs: Inputs | None, scaling: Scaling | None, meets: bool = True,
        survey: Survey | None = None, arrived: bool = False,
    ) -> list[Launch] | None:  # fmt: skip
        """Updates a plan's parameters with these gradients. Returns the launches.

        None, and nothing done, where a gradient's dtype is new. With a `survey` the gradients are its own. If they
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
            grads = converted_gradients(plan, grads, self.names)
        if plan.copied:
            read_all(plan.copied)
        if plan.sections:
            check_shapes(plan, grads, self.names)
            grads = [*plan.seen(grads)]
        try:
            launches = self._launches(plan, grads, inputs, scaling, arrived)
        except OtherDtype:
            return None
        if meets and self.options.across is not None and not self.options.across.agreed:
            overflowed = scaling is not None and bool(scaling.found_inf)
            self.options.across.agree(launches, len(self.snapshot.sizes), bool(self.interface.shared), overflowed)
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

    def _told(self, error: RulecError) -> Exception:
        """Reports an error of ranks with shards of the same tensors to the waiting ranks of `reduce_over`."""
        return error if self.options.across is None else self.options.across.fail(error, ())

    def _write_sparse(
        self, plan: StepPlan, grads: Sequence[Tensor], scaling: Scaling | None
    ) -> list[Launch] | None:  # fmt: skip
        """The same, where some gradients are sparse: their rows are updated, the other rows stay as they are."""
        try:
            launches, rows = launches_of_rows(self, plan, grads, scaling)
        except OtherDtype:
            return None
        try:
            self.writer.write(launches, plan.written)
        finally:
            for each in rows:
                each.put_back()
        self.buffers.show()
        return launches

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
        changed = self.group_states is not None and self.group_states.changed(groups)
        self.capture_mode.check_capture(
            NEW_TENSORS if plan is None else NEW_NUMBERS if changed else
            "" if scaling_kind(scaling) in plan.scalings else NEW_SCALING
        )  # fmt: skip

    # Steps of some parameters after others

    def begin(self, groups: Groups) -> None:
        """Opens a step in which parameters `fire` one after the other, with the groups' numbers of now."""
        if self.capture_mode.capturing:
            raise RulecError("updates inside the backward pass cannot be captured in a CUDA graph: use a plain step")
        self.forget_early()
        if self.group_states is not None:
            self.group_states.read(groups)
        self.measurements.begin_apart()
        self.writer.begin()

    def forget_early(self) -> None:
        """Drops the stages that have run early."""
        if isinstance(self.offload, HostStep):
            self.offload.early.forget()

    def end(self, groups: Sequence[dict[str, Any]], taken: bool = True) -> None:
        """Closes the step: values of groups and of the model take their new value. It counts where it was `taken`."""
        self.forget_early()
        self.writer.end()
        if taken:
            self.measurements.complete()
        self.measurements.end(taken)
        if self.group_states is not None:
            self.group_states.publish(groups)
            self.writer.finish()

    def abandon(self) -> None:
        """Closes a step without updates, or after its updates were taken back; brings the earlier statistics back."""
        self.forget_early()
        self.writer.abandon()
        self.measurements.end(False)

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
            seen = plan.seen(real_gradients(plan, grads, self.names))
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
