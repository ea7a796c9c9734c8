"""The tensors of an optimizer's steps: their routes, engines, states and plans, built of groups and states as they are.

They are built again when something other than numbers changed: parameters added, taken out or replaced, another rule,
states loaded or edited, another dtype or memory order. States are copied into the new buffers, so nothing is lost. All
else is followed at the next step.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from rulec.errors import RulecError, interrupted
from rulec.torch.groups.capture import NEW_TENSORS, capture_mode_of
from rulec.torch.groups.engine import TensorRef, add_parameters, engines_of, in_order, order_of
from rulec.torch.groups.entries import shared_states
from rulec.torch.groups.interface import Interface
from rulec.torch.groups.options import Options, fitting
from rulec.torch.groups.routes import names_of, routes_of
from rulec.torch.groups.values import Groups, GroupStates, check_complete, group_rules_of
from rulec.torch.offload.offload import offload_of
from rulec.torch.states.states import Buffers
from rulec.torch.states.store import Store
from rulec.torch.step.checks import check_parts, check_real
from rulec.torch.step.description import Alike
from rulec.torch.step.plan import Plans, Writer, read_all
from rulec.torch.step.ranks import with_ranks
from rulec.torch.step.repeat import Repeat
from rulec.torch.step.snapshot import Change, Snapshot
from rulec.torch.step.statistics import StepMeasurements
from rulec.torch.tensors.dtensor import check_gradient, is_dtensor
from rulec.torch.tensors.fake import plain_arithmetic, plain_memory
from rulec.torch.tensors.tensors import TorchArrays, check_conforms, is_dense, real_gradient, real_view


class StepTensors:
    """The engines over the parameters of some groups, and all that a step knows of them; states are in `buffers`.

    Raises HyperError, TensorError, StateMismatch or BackendUnavailable, and then nothing was changed. If `strict`,
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
        self.options = options
        self.names = names_of(groups)
        check_parts(options, self.routes)
        check_real(options, self.params, self.names)
        self.capture_mode = capture_mode_of(self.params, groups, options)
        self.capture_mode.check_capture(NEW_TENSORS)
        self.snapshot = Snapshot(interface, groups, options, self.capture_mode, self.names)
        #: The transfers of the step, where it is offloaded.
        self.offload = None if options.offload is None else offload_of(self.routes, options.offload, options.weights)
        #: Whether kernels read and write the parameters themselves.
        self._in_place = self.offload is None or self.offload.in_place
        self._add_engines(groups, order)
        #: The description that other ranks must have too, where there are DTensors.
        self.alike = (
            Alike(self.routes, self.tensor_refs, order, groups, options) if any(map(is_dtensor, self.params)) else None
        )
        self.measurements = StepMeasurements(self.engines, self.routes, self.tensor_refs, options)
        #: Contiguous copies of parameters with gaps in memory, by the index of their route.
        self.copies = self._make_copies() if self._in_place else {}
        self.plans = Plans(self.params, self.engines, self.routes, self.tensor_refs, self.copies)
        self._add_writer()
        self.buffers = Buffers(self.engines, self.routes, self.tensor_refs, Store(saved), groups)
        #: The repeated step, for a next step with the same tensors.
        self.repeat: Repeat | None = None
        self._restore(saved, groups, strict)

    def _add_engines(self, groups: Groups, order: Sequence[int]) -> None:
        """Makes the engines of the groups' rules, and adds the tensors of all routes to them, in this order."""
        arrays = TorchArrays() if self.offload is None else self.offload.arrays
        engines = engines_of(self.interface, self.group_rules, groups, self.options, self.capture_mode, arrays)
        self.engines = in_order(engines, [self.routes[place].group for place in order])
        tensors = [route.here for route in self.routes] if self.offload is None else self.offload.mirrors
        self.tensor_refs = add_parameters(self.engines, self.group_rules, self.routes, order, tensors)
        if self.offload is not None:
            self.offload.attach(self.tensor_refs)
        #: The references of parameters that can be updated apart from steps here, by index.
        self._whole: dict[int, TensorRef] = {}
        if self.offload is None:
            routed = zip(self.routes, self.tensor_refs, strict=True)
            self._whole = {route.place: tensor_ref for route, tensor_ref in routed if route.section is None}

    def _add_writer(self) -> None:
        """Makes the writer, and the states of groups and of the model."""
        interface, on_device = self.interface, self.capture_mode.on_device
        steps, skips = bool(interface.shared) or (on_device and interface.skips), interface.skips and not on_device
        remembers = bool(interface.shared and self.engines)
        written = [route.param for route in self.routes]
        self.writer = Writer(written, self.engines, self.tensor_refs, steps, skips, remembers)
        self.group_states = GroupStates(interface.shared, self.engines[0]) if remembers else None

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
        if self.group_states is not None:
            self.group_states.read(groups)
        self.buffers.fill(values)
        self.buffers.show()

    def make_states(self, groups: Sequence[dict[str, Any]]) -> None:
        """Allocates the states of every parameter that has a gradient, as before its first update."""
        with self.plain():
            read_all((self.routes[i], copy) for i, copy in self.copies.items())
            self.buffers.begin({param for param in self.params if param.grad is not None})
            self.buffers.show()
        if self.group_states is not None:
            self.group_states.publish(groups)

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
        changes = self.snapshot.changes(groups, survey)
        surveyed = survey is not None and survey.fresh
        if not (surveyed or addresses.same() or self._follow_states()):
            return True
        return bool(changes) and not self._follow(changes, groups)

    def is_as_before(self) -> bool:
        """Whether parameters, states and gradients are as at the last survey, except for gradients at new addresses."""
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
            if not self.snapshot.take_values(groups, self.group_rules):
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
        if self.snapshot.altered() is not None:
            return False
        moved = {*self.snapshot.take_memory()}
        for i, (route, (engine, tensor_id)) in enumerate(zip(self.routes, self.tensor_refs, strict=True)):
            if route.place in moved and i not in self.copies and self._in_place:
                engine.replace(tensor_id, route.here)
        return True

    def release(self) -> None:
        """Drops the survey's references to parameters and gradients."""
        if self.plans.survey is not None and self.plans.survey.fresh:
            self.plans.survey.release()

    # Parts of a step

    def tensor_ref(self, place: int) -> TensorRef | None:
        """The tensor reference of a parameter, by index.

        None for one whose sections have references of their own, and where a step is offloaded.
        """
        return self._whole.get(place)

    def plain(self) -> AbstractContextManager[Any]:
        """A block of arithmetic as kernels need it: without autocast, and without inference mode on a device."""
        casting = [*filter(torch.is_autocast_enabled, self.capture_mode.types)]
        kept = self.capture_mode.on_device or self.offload is not None
        return plain_arithmetic(casting) if casting or kept else nullcontext()

    def check_undisturbed(self, places: Sequence[int]) -> None:
        """Takes over parameters whose memory moved; RulecError for any other change since the step was opened."""
        edited = self.buffers.store.edits.changed
        if edited or not (self.buffers.addresses.same(tuple(places)) or self._follow_states()):
            raise RulecError(
                "the optimizer's state was changed in the middle of a step: change it before, or after step()"
            )
        if self.snapshot.moved(places) and not self._follow_memory():
            altered = self.snapshot.altered()
            assert altered is not None
            raise RulecError(
                f"{self.names[altered]} was given another shape, dtype or device in the middle of a step: do that "
                f"before, or after step()"
            )

    def conforming(self, place: int, grad: Any) -> Tensor:
        """The gradient of the parameter with this index as kernels read it; TensorError where it does not fit."""
        check_gradient(grad, self.params[place], self.names[place])
        here = real_gradient(grad, self.names[place])
        check_conforms(here, real_view(self.params[place]), self.names[place])
        return here
