"""A torch optimizer's engines: one for each rule its groups mean, and what a step must look at before it runs them.

An assembly is made of the groups and states as they are, and made again when something other than numbers changed:
parameters added, taken out or replaced, another rule meant, states loaded or edited, another dtype or memory order.
States are copied into the new one's buffers, so nothing is lost. Everything else a step finds is cheap to look at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import chain
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from rulec.errors import RulecError, StateMismatch
from rulec.language.rule import Rule
from rulec.runtime.counts import is_count
from rulec.runtime.device import Scaling
from rulec.runtime.engine import Launch, run
from rulec.torch.ahead import FEW, Ahead
from rulec.torch.fake import has_no_memory, is_fake, real_memory
from rulec.torch.inputs import Inputs
from rulec.torch.interface import Interface
from rulec.torch.members import Member, Options, add_parameters, fitting, members_of, words_of
from rulec.torch.memory import plain_arithmetic, plain_memory
from rulec.torch.placed import address_of, as_placed, check_gradient, fill, is_placed, part_of
from rulec.torch.residence import NEW_NUMBERS, NEW_SCALING, NEW_TENSORS, is_asked, live_values, residence_of
from rulec.torch.routes import routes_of
from rulec.torch.shared import Shared, check_complete
from rulec.torch.states import Store
from rulec.torch.tensors import (
    OtherDtype,
    check_apart,
    check_parameters,
    dtype_name,
    is_dense,
    real_view,
)
from rulec.torch.values import Groups, Values, choices_of, table_of

#: How many sets of parameters with gradients an assembly remembers the plans of.
_PLANS = 1024


@dataclass
class _Share:
    """One engine's tensors in a step, and where their gradients are among those of the whole step (None: all)."""

    member: Member
    ids: tuple[int, ...]
    places: list[int] | None


@dataclass
class _Plan:
    """What is the same in every step in which the same parameters have gradients.

    `chosen` are the parameters' places among all, `converted` those among them whose gradients kernels see otherwise;
    `taken` are the ways in which gradients were scaled in the steps so far.
    """

    shares: list[_Share]
    chosen: Sequence[int]
    written: list[Tensor]
    converted: list[int]
    copied: list[tuple[Tensor, Tensor]]
    taken: set[tuple[bool, bool]] = field(default_factory=set)


class Assembly:
    """Engines over the parameters of some groups; `store` has their states, in the buffers that kernels write.

    Raises HyperError, TensorError, StateMismatch or BackendUnavailable, and then nothing was changed. Where `strict`,
    a parameter's saved state must have everything its rule needs; otherwise what is missing starts afresh.
    """

    def __init__(
        self, interface: Interface, groups: Groups, saved: Mapping[Any, Any], options: Options, strict: bool = False
    ) -> None:
        self.interface = interface
        self.choices = choices_of(interface, groups)
        self._sizes = [len(group["params"]) for group in groups]
        self.params: list[Tensor] = [p for group in groups for p in group["params"]]
        self.options = options = fitting(options, self.params)
        self._address = address_of(self.params)
        self.routes = routes_of(interface, self.choices, groups, options.across is not None)
        self.names = [route.name for route in self.routes]
        self.residence = residence_of(self.params, groups, options)
        self.residence.check_capture(NEW_TENSORS)
        self._values = Values(interface.group_keywords, groups, self._live)
        self._flags = Values(interface.flag_keywords, groups)
        self._words = words_of(groups)
        check_parameters(self.params, self.names)
        self._addresses = [*map(self._address, self.params)]
        self._facts = [_facts(p) for p in self.params]
        self.members = members_of(interface, self.choices, groups, options, self.residence.asked)
        self._take_live(groups)
        self._homes = add_parameters(self.members, self.choices, self.routes)
        self._copies = self._make_copies()
        self._shared = [Shared(interface.shared, m.engine) for m in self.members if interface.shared]
        self._skipped_steps = self._skipped = 0
        self._plans: dict[tuple[int, ...] | None, _Plan] = {}
        self._opened = self._counted_skip = False
        self._ahead: Ahead | None = None
        self._restore(saved, groups, strict)
        self.store = Store(saved)
        self._publish()

    def _make_copies(self) -> dict[int, Tensor]:
        """Contiguous copies of parameters with gaps in memory, and of those whose rules need rows and columns there."""
        found = {}
        for place, (member, tensor_id) in enumerate(self._homes):
            if not is_dense(part_of(self.params[place])) or member.engine.needs_copy(tensor_id, member.table):
                with plain_memory():
                    found[place] = real_view(self.params[place]).contiguous()
                member.engine.replace(tensor_id, found[place])
        return found

    # States

    def _restore(self, saved: Mapping[Any, Any], groups: Groups, strict: bool) -> None:
        """Allocates what has a saved state, or must have one before the first step, and copies the values into it."""
        held = [{k: v for k, v in saved.get(p, {}).items() if v is not None} for p in self.params]
        chosen = [i for i, values in enumerate(held) if values or self.interface.full_at_once]
        for member in self.members:
            places = [i for i in chosen if self._homes[i][0] is member]
            dtypes = [_grad_dtype(self.params[i]) for i in places]
            member.engine.prepare([self._homes[i][1] for i in places], dtypes, member.table)
        for i in chosen:
            _check_saved(self._buffers(i), held[i], self.names[i], strict)
        if strict and chosen:
            check_complete(self.interface.shared, groups)
        for shared in self._shared:
            shared.read(groups)
        with plain_memory(), real_memory():
            for i in chosen:
                self._copy_saved(i, held[i])

    def _buffers(self, place: int) -> dict[str, Tensor]:
        """A parameter's buffers under torch's names, complex where it is; empty before its first gradient."""
        member, tensor_id = self._homes[place]
        flavour, param, routed = member.choice.flavour, self.params[place], self.routes[place].routed
        found = {}
        for name, value in member.engine.state(tensor_id).items():
            if name != "step" or flavour.counted or routed:
                paired = param.is_complex() and value.dim() > param.dim()
                made = torch.view_as_complex(value) if paired else value
                found[flavour.outside(name, routed)] = as_placed(made, param)
        return found

    def _copy_saved(self, place: int, saved: Mapping[str, Any]) -> None:
        buffers = self._buffers(place)
        known = {key: buffer for key, buffer in buffers.items() if key in saved and not is_fake(buffer)}
        for key, buffer in known.items():
            fill(buffer, torch.as_tensor(saved[key], device=_device_of(saved[key])), self.names[place])
        member, tensor_id = self._homes[place]
        if known and not (member.choice.flavour.counted or self.routes[place].routed):
            # torch keeps no count here, and asks no more than whether there was a step before.
            member.engine.state(tensor_id)["step"].fill_(1)

    def _publish(self) -> None:
        """Shows every buffer in the store; entries there that are no state of the rule stay."""
        for member in self.members:
            member.extensions = member.engine.extensions
        for place, param in enumerate(self.params):
            buffers = self._buffers(place)
            if buffers:
                self.store.entry(param).take(buffers)
        self.store.ledger.changed = False

    # Steps

    def stale(self, groups: Groups, state: Any) -> bool:
        """Whether an assembly must be made anew before a step of these groups with this state."""
        if self._ahead is not None:
            self._ahead.ask()
        store = self.store
        if state is not store or store.ledger.changed:
            return True
        same, lists = self._values.same(groups), self._values.lists
        if [*map(len, lists)] != self._sizes or not all(map(is_, chain.from_iterable(lists), self.params)):
            return True
        if [*map(self._address, self.params)] != self._addresses and not self._moved():
            return True
        return not same and not self._read_values(groups)

    def _moved(self) -> bool:
        """Takes over parameters whose memory moved; False where more than their address is new."""
        if [_facts(p) for p in self.params] != self._facts:
            return False
        self.residence.check_capture(NEW_TENSORS)
        check_apart(self.params, self.names)
        now = [*map(self._address, self.params)]
        for place, (old, new) in enumerate(zip(self._addresses, now, strict=True)):
            if old != new and place not in self._copies:
                member, tensor_id = self._homes[place]
                member.engine.replace(tensor_id, real_view(self.params[place]))
        self._addresses = now
        return True

    def _read_values(self, groups: Groups) -> bool:
        """Takes over other numbers; False where the groups mean other rules now."""
        self.residence.check_capture(NEW_NUMBERS)
        decaying = {choice.flavour for choice in self.choices if choice.decay}
        if not self._flags.same(groups):
            if choices_of(self.interface, groups, decaying) != self.choices or words_of(groups) != self._words:
                return False
            if is_asked(groups, self.options) != self.residence.asked:
                return False
            self._flags = Values(self.interface.flag_keywords, groups)
        self._values = Values(self.interface.group_keywords, groups, self._live)
        for member in self.members:
            member.table = table_of(member.choice, [groups[i] for i in member.groups])
        self._take_live(groups)
        return True

    @property
    def _live(self) -> Callable[[Any], bool] | None:
        """Which hyper-parameters are read on the device; None where none can be."""
        return self.residence.is_live if self.residence.scales else None

    def _take_live(self, groups: Groups) -> None:
        for member in self.members:
            own = [groups[i] for i in member.groups]
            member.engine.live = live_values(self.residence, member.choice, own)

    def step(
        self, groups: Sequence[dict[str, Any]], inputs: Inputs | None = None, scaling: Scaling | None = None
    ) -> bool:
        """One step of every parameter that has a gradient. False, and nothing done, where a gradient's dtype is new.

        `scaling` is how gradients were scaled, where the residence allows it.
        """
        casting = [*filter(torch.is_autocast_enabled, self.residence.types)]
        # What is made on the device may be written in later steps.
        if casting or (self.residence.there and torch.is_inference_mode_enabled()):
            with plain_arithmetic(casting):
                return self._step(groups, inputs, scaling)
        return self._step(groups, inputs, scaling)

    def _step(self, groups: Sequence[dict[str, Any]], inputs: Inputs | None, scaling: Scaling | None) -> bool:
        grads: list[Any] = [p.grad for p in self.params]
        present = None
        if [1 for g in grads if g is None]:
            present = tuple([i for i, g in enumerate(grads) if g is not None])
            grads = [g for g in grads if g is not None]
        plan = self._plans.get(present)
        if self.residence.there:
            self._check_capture(groups, plan, scaling)
        if plan is None:
            plan = self._plan(present, grads)
        for shared in self._shared:
            shared.read(groups)
        if not self._write(plan, grads, inputs, scaling):
            return False
        for shared in self._shared:
            shared.publish(groups)
        if self.residence.there:
            plan.taken.add(_way(scaling))
        return True

    def _write(self, plan: _Plan, grads: list[Any], inputs: Inputs | None, scaling: Scaling | None) -> bool:
        """Updates a plan's parameters with these gradients. False, and nothing done, where one's dtype is new."""
        for place in plan.converted:
            check_gradient(grads[place], plan.written[place], self.names[plan.chosen[place]])
            grads[place] = real_view(grads[place])
        if plan.copied:
            _copy_all((copy, param) for param, copy in plan.copied)
        try:
            launches = _launches(plan, grads, inputs, scaling)
        except OtherDtype:
            return False
        if self.options.across is not None:
            self.options.across.agree(launches, len(self._sizes), bool(self.interface.shared))
        try:
            if self.interface.skips and not self.residence.there:
                self._run_skipping(launches, plan.written)
            else:
                # Before the kernel: what torch keeps of the tensors is still in the caches.
                increment_version(plan.written)
                self._run(launches)
        finally:
            if plan.copied:
                _copy_all(plan.copied)
        if [1 for m in self.members if m.extensions != m.engine.extensions]:
            self._publish()
        return True

    # A step of some parameters after others

    def begin(self, groups: Groups) -> None:
        """Opens a step in which parameters `fire` one after the other, with the numbers that groups have now."""
        if self.residence.capturing:
            raise RulecError("updates inside the backward pass cannot be captured in a CUDA graph: use a plain step")
        for shared in self._shared:
            shared.read(groups)
        for member in self.members:
            member.engine.begin()
        self._opened, self._counted_skip = True, False

    def fire(self, places: tuple[int, ...], grads: Sequence[Tensor]) -> bool:
        """Updates the parameters at these places, in order, in the step that is open.

        False, and nothing done, where a gradient's dtype is new. The bits are those of one step of all parameters.
        """
        self._check_undisturbed(places)
        casting = [*filter(torch.is_autocast_enabled, self.residence.types)]
        with plain_arithmetic(casting) if casting or self.residence.there else nullcontext():
            plan = self._plans.get(places) or self._plan(places, grads)
            return self._write(plan, [*grads], None, None)

    def _check_undisturbed(self, places: Sequence[int]) -> None:
        """Takes over parameters whose memory moved; RulecError for what else was changed since the step was opened."""
        if self.store.ledger.changed:
            raise RulecError(
                "the optimizer's state was changed in the middle of a step: change it before, or after step()"
            )
        if any(self._address(self.params[i]) != self._addresses[i] for i in places) and not self._moved():
            changed = next(i for i, facts in enumerate(self._facts) if _facts(self.params[i]) != facts)
            raise RulecError(
                f"{self.names[changed]} was given another shape, dtype or device in the middle of a step: do that "
                f"before, or after step()"
            )

    def fire_part(
        self, places: tuple[int, ...], grads: Sequence[Tensor], way: Callable[[Rule], Rule], counts: bool
    ) -> None:  # fmt: skip
        """Runs a part of the step on the parameters at these places: see `Engine.ready_part`."""
        casting = [*filter(torch.is_autocast_enabled, self.residence.types)]
        with plain_arithmetic(casting):
            plan = self._plans.get(places) or self._plan(places, grads)
            seen = [real_view(grad) for grad in grads]
            _copy_all((copy, param) for param, copy in plan.copied)
            launches = [launch for share in plan.shares for launch in _part_launches(share, seen, way, counts)]
            increment_version(plan.written)
            self._run(launches)
            _copy_all(plan.copied)
        self._publish()

    def written_beside(self, place: int) -> Mapping[str, Tensor]:
        """What kernels write beside the parameter at this place, its count included; empty before its first step."""
        member, tensor_id = self._homes[place]
        return member.engine.state(tensor_id)

    def end(self, groups: Sequence[dict[str, Any]]) -> None:
        """Closes the step: what groups and the model remember takes its new value."""
        self._opened = False
        for member in self.members:
            member.engine.end()
        for shared in self._shared:
            shared.publish(groups)

    def _check_capture(self, groups: Groups, plan: _Plan | None, scaling: Scaling | None) -> None:
        """RulecError where a step is captured that does more than those after it."""
        if not self.residence.capturing:
            return
        if self.options.across is not None:
            raise RulecError("a step with reduce_over waits for other processes, and cannot be captured")
        changed = any(shared.changed(groups) for shared in self._shared)
        self.residence.check_capture(
            NEW_TENSORS if plan is None else NEW_NUMBERS if changed else
            "" if _way(scaling) in plan.taken else NEW_SCALING
        )  # fmt: skip

    def _run(self, launches: Sequence[Launch]) -> None:
        """Runs launches, in a step of each engine where that has something to begin and end."""
        if self._opened or not (self._shared or (self.residence.there and self.interface.skips)):
            run(launches)
            return
        for member in self.members:
            member.engine.begin()
        try:
            run(launches)
        finally:
            for member in self.members:
                member.engine.end()

    @property
    def skipped_steps(self) -> int:
        """In how many steps a tensor's update was skipped. Waits for devices."""
        return self._skipped_steps + max((m.engine.skipped_there.steps(m.engine.host) for m in self.members), default=0)

    def _run_skipping(self, launches: Sequence[Launch], fired: Sequence[Tensor]) -> None:
        """Runs what may be skipped, and tells autograd of the parameters that were written."""
        buckets = [b for m in self.members for b in m.engine.buckets.values()]
        before = [b.counts.numbers.copy() for b in buckets]
        self._run(launches)
        skipped = sum(m.engine.skipped for m in self.members)
        if skipped == self._skipped:
            increment_version(fired)
            return
        self._skipped = skipped
        self._skipped_steps += not self._counted_skip
        self._counted_skip = self._opened
        counted = ((b.tensors, old, b.counts.numbers) for b, old in zip(buckets, before, strict=True))
        moved = {id(t) for tensors, *counts in counted for t, i, j in zip(tensors, *counts, strict=True) if i != j}
        homes = zip(self.params, self._homes, strict=True)
        increment_version([p for p, (member, i) in homes if id(member.engine.tensors[i]) in moved])

    def change(self, way: Callable[[Rule], Rule | None]) -> None:
        """One step of another rule on the same parameters and states, of those that have states."""
        if self.residence.capturing:
            raise RulecError("eval() and train() cannot be captured in a CUDA graph: call them before or after it")
        held = [p for p in self.params if self.store.get(p)]
        copied = [(self.params[place], copy) for place, copy in self._copies.items()]
        _copy_all((copy, param) for param, copy in copied)
        increment_version(held)
        for member in self.members:
            member.engine.change(way, member.table)
        _copy_all(copied)

    def _plan(self, present: tuple[int, ...] | None, grads: Sequence[Tensor]) -> _Plan:
        chosen = range(len(self.params)) if present is None else present
        written = [self.params[i] for i in chosen]
        shares = []
        for member in self.members:
            places = [place for place, i in enumerate(chosen) if self._homes[i][0] is member]
            if places:
                ids = tuple([self._homes[chosen[place]][1] for place in places])
                shares.append(_Share(member, ids, None if len(places) == len(chosen) else places))
        converted = [place for place, p in enumerate(written) if p.is_complex() or is_placed(p)]
        if len(self._plans) >= _PLANS:
            self._plans.clear()
        if len(grads) >= FEW and self.residence.types == {"cpu"} and self.options.backend in (None, "cpu"):
            self._ahead = Ahead([*written, *grads])
        copied = [(self.params[i], self._copies[i]) for i in chosen if i in self._copies]
        plan = self._plans[present] = _Plan(shares, chosen, written, converted, copied)
        return plan


def _launches(
    plan: _Plan, grads: Sequence[Tensor], inputs: Inputs | None, scaling: Scaling | None = None
) -> list[Launch]:
    """Every engine's share of a step, checked; OtherDtype where a gradient's dtype is new."""
    launches: list[Launch] = []
    for share in plan.shares:
        own = grads if share.places is None else [grads[i] for i in share.places]
        given = None if inputs is None else inputs.of(plan.written, share.places)
        launches += share.member.engine.ready(share.ids, own, share.member.table, given, scaling)
    return launches


def _part_launches(
    share: _Share, grads: Sequence[Tensor], way: Callable[[Rule], Rule], counts: bool
) -> Sequence[Launch]:  # fmt: skip
    own = grads if share.places is None else [grads[i] for i in share.places]
    return share.member.engine.ready_part(share.ids, own, share.member.table, way, counts)


def _way(scaling: Scaling | None) -> tuple[bool, bool]:
    """Whether steps may be skipped, and gradients are to be unscaled: kernels differ."""
    return scaling is not None, scaling is not None and scaling.scale is not None


def _copy_all(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Writes the second of each pair into the first."""
    with plain_memory():
        for into, source in pairs:
            real_view(into).copy_(real_view(source))


def _device_of(value: Any) -> torch.device:
    """Where a saved value is: a number is here, whatever device torch makes tensors on by default."""
    return value.device if isinstance(value, Tensor) else torch.device("cpu")


def _grad_dtype(param: Tensor) -> str:
    """Our name for the dtype of a parameter's gradient, its own where there is none."""
    return dtype_name(param.dtype if param.grad is None else param.grad.dtype)


def _facts(param: Tensor) -> tuple[Any, ...]:
    here = part_of(param)
    return here.shape, here.stride(), here.dtype, here.device


def _check_saved(buffers: Mapping[str, Tensor], saved: Mapping[str, Any], name: str, strict: bool) -> None:
    """StateMismatch where a saved state cannot be that of the parameter with these buffers."""
    if not saved:
        return
    for key, buffer in buffers.items():
        if key not in saved:
            if strict:
                known = ", ".join(sorted(saved))
                raise StateMismatch(f"the saved state of {name} has no {key} (it has {known}): it is of another rule")
            continue
        shape, wanted = tuple(np.shape(saved[key])), tuple(buffer.shape)
        if shape != wanted and not (wanted == () and shape == (1,)):
            raise StateMismatch(f"{key} of {name} was saved with shape {shape}, where it has {wanted}")
        if strict and key == "step" and not (has_no_memory(saved[key]) or is_count(saved[key])):
            raise StateMismatch(f"step of {name} was saved as {saved[key]!r:.80}, which is no count of updates")
