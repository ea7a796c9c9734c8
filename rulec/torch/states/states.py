"""The states under torch's names: their buffers, and `optimizer.state`, which knows when others have written to it.

Kernels write to buffers of their own. Other code may put another tensor in their place, as checkpoint tools and
Gaussian splatting do: it edits `optimizer.state[p]`. This is noticed, and the values are taken over at the next step.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rulec.compiler.ir import axes_of_letters
from rulec.compiler.layout import scale_name
from rulec.compiler.weights import is_part, reweighed
from rulec.errors import StateMismatch
from rulec.formats import UNBIASED, Format
from rulec.runtime.buckets.scalar_table import is_count
from rulec.runtime.storage.allocator import formats_of, recoded
from rulec.torch.fastpath.addresses import ShownState, StateAddresses, facts_of
from rulec.torch.groups.engine import TensorRef, TorchEngine
from rulec.torch.groups.routes import Route
from rulec.torch.groups.values import Groups
from rulec.torch.states.interop.load import is_coded, taken
from rulec.torch.states.quantized import arrays_here, coded_names, saved_states, values_here, with_plain_names
from rulec.torch.states.saved import FORMATS, check_fits, check_formats, check_values
from rulec.torch.states.sections import SectionState, loaded_of_sections, of_section, saved_of_sections
from rulec.torch.states.store import Store, parts_of
from rulec.torch.tensors.dtensor import as_dtensor, fill, is_flat, local_tensor
from rulec.torch.tensors.fake import is_fake, plain_memory, real_memory
from rulec.torch.tensors.memory import check_state_memory
from rulec.torch.tensors.sections import Section
from rulec.torch.tensors.tensors import check_apart, dtype_name, real_view

_SCALE = scale_name("")


class Buffers:
    """The buffers of the parameters on some routes, by their homes; `store` shows them to users.

    The groups say in which formats saved states are, and get the formats of the buffers.
    """

    def __init__(
        self, engines: Sequence[TorchEngine], routes: Sequence[Route], tensor_refs: Sequence[TensorRef], store: Store,
        groups: Groups,
    ) -> None:  # fmt: skip
        self._engines, self._routes, self._tensor_refs, self.store = engines, routes, tensor_refs, store
        self._groups: Sequence[Any] = groups
        check_formats(groups)
        #: For each group the keys of formats of its saved quantized states.
        self._formats: list[Mapping[str, str]] = [group.get(FORMATS, {}) for group in groups]
        by_param: dict[int, list[int]] = {}
        for place, route in enumerate(routes):
            by_param.setdefault(route.place, []).append(place)
        #: The addresses of the states that the store shows.
        self.addresses = StateAddresses()
        #: For each parameter with sections the indices of their routes.
        self._fused = [places for places in by_param.values() if routes[places[0]].section is not None]

    def prepare(self, saved: Mapping[Any, Any], full: bool, strict: bool) -> dict[int, Mapping[str, Any]]:
        """Allocates the buffers of every parameter that has a saved state, or of all where `full`.

        The saved values by place; they are checked, and nothing is written. If `strict`, a saved state must have
        everything its rule needs.
        """
        for route, (engine, _) in zip(self._routes, self._tensor_refs, strict=True) if strict else ():
            names = {engine.group_rule.entry.outside(state, route.routed) for state in route.rule.state}
            check_values(saved.get(route.param, {}), names, route.like, self._owner(route))
        held: dict[int, Mapping[str, Any]] = {
            place: with_plain_names(parts_of(saved.get(route.param, {}))) for place, route in enumerate(self._routes)
        }
        for place, values in held.items():
            for name, value in values.items():
                check_state_memory(value, f"{name} of {self._routes[place].name}")
        chosen = [place for place, values in held.items() if values or full]
        self._allocate(chosen)
        held |= self._of_sections({place: held[place] for place in chosen})
        held = {place: self._reweighed(place, self._recoded(place, held[place])) for place in chosen}
        for place, values in held.items():
            check_fits(self._of(place), values, self._routes[place].name, strict)
            if self._routes[place].section is None:
                _check_whole(self._of(place), values, self._routes[place].name)
        return held

    def begin(self, params: Collection[Tensor]) -> None:
        """Allocates the buffers of these parameters."""
        self._allocate([place for place, route in enumerate(self._routes) if route.param in params])

    def _allocate(self, chosen: Sequence[int]) -> None:
        for engine in self._engines:
            places = [place for place in chosen if self._tensor_refs[place][0] is engine]
            params = [self._routes[place].param for place in places]
            dtypes = [dtype_name(p.dtype if p.grad is None else p.grad.dtype) for p in params]
            engine.prepare([self._tensor_refs[place][1] for place in places], dtypes, engine.table)

    def _of_sections(self, held: Mapping[int, Mapping[str, Any]]) -> dict[int, Mapping[str, Any]]:
        """The saved values of sections, by their indices. `held` has the values of parameters."""
        loaded: dict[int, Mapping[str, Any]] = {}
        for places in self._fused:
            if places[0] in held:
                states, sections = self._section_states(places)
                route = self._routes[places[0]]
                owner = self._owner(route)
                before = formats_of(self._formats[route.group], held[places[0]], owner)
                parts = loaded_of_sections(held[places[0]], before, states, sections, route.param, owner)
                loaded |= dict(zip(places, parts, strict=True))
        return loaded

    def joined(self) -> dict[int, Mapping[str, Any]]:
        """The states of parameters with sections as they are saved, by the parameters' indices."""
        joined = {self._routes[places[0]].place: self._joined_of(places) for places in self._fused}
        return {place: states for place, states in joined.items() if states}

    def _joined_of(self, places: Sequence[int]) -> Mapping[str, Any]:
        """The states of sections with these indices as they are saved for their parameter."""
        states, sections = self._section_states(places)
        if not any(states):
            return {}
        skips = any(self._routes[place].rule.skip is not None for place in places)
        return saved_of_sections(states, sections, self._routes[places[0]].param, skips)

    def _section_states(self, places: Sequence[int]) -> tuple[list[dict[str, SectionState]], list[Section]]:
        """The states of sections with these indices under torch's names, and the sections."""
        states, sections = [], []
        for place in places:
            engine, tensor_id = self._tensor_refs[place]
            tensor, entry, route = engine.tensors[tensor_id], engine.group_rule.entry, self._routes[place]
            axes = {} if tensor.bucket is None else {b.name: b.axes for b in tensor.bucket.program.states}
            letters = {name: x.letters if x == axes_of_letters(x.letters) else "" for name, x in axes.items()}
            written, formats = self.written(place), self.formats_here(place)
            states.append({
                (outside := entry.outside(name, route.routed)): SectionState(
                    value, letters.get(name, "bij"), tensor.view, self._shown(place, name, outside, value),
                    formats.get(name), written.get(scale_name(name)),
                )
                for name, value in written.items()
                if (name != "step" or self._counted(place)) and not name.endswith(_SCALE)
            })  # fmt: skip
            sections += [route.section] if route.section is not None else []
        return states, sections

    @staticmethod
    def _owner(route: Route) -> str:
        return route.name if route.section is None else route.name.removesuffix(f"[{route.section.number}]")

    def _recoded(self, place: int, saved: Mapping[str, Any]) -> Mapping[str, Any]:
        """A parameter's saved values in the formats of its buffers."""
        route = self._routes[place]
        entry, after = self._tensor_refs[place][0].group_rule.entry, self.formats(place)
        outside, rule = partial(entry.outside, routed=route.routed), entry.rule.key if not route.routed else ""
        saved, kept = taken(saved, outside, rule, after, route.like, self._groups[route.group], route.name)
        before = formats_of(
            {**self._formats[route.group], **{k: form.key for k, form in kept.items()}}, saved, route.name
        )
        names = {*before, *after} & saved.keys()
        if not names:
            return saved
        arrays, before = arrays_here(saved, before, names, route.like, route.name)
        arrays = recoded(arrays, before, after, tuple(route.here.shape), route.name)
        others = {name: value for name, value in saved.items() if not {name, name.removesuffix(_SCALE)} & names}
        return others | {name: self._shown(place, name, name, torch.as_tensor(array)) for name, array in arrays.items()}

    def _reweighed(self, place: int, saved: Mapping[str, Any]) -> Mapping[str, Any]:
        """A parameter's saved values with the residual of its kind of weight, computed from that of another kind."""
        param, name = self._routes[place].like, self._routes[place].name
        if is_fake(real_view(param)):
            return saved
        values = reweighed(
            saved, self._of(place), lambda: values_here(param, param, name),
            lambda part: values_here(part, param, name), name,
        )  # fmt: skip
        return {k: self._shown(place, k, k, torch.as_tensor(v)) if k not in saved else v for k, v in values.items()}

    def _shown(self, place: int, name: str, outside: str, state: Tensor) -> Tensor:
        """An array of a state, by the rule's name and by torch's: a DTensor where its parameter is one."""
        param = self._routes[place].like
        form = self.formats(place).get(outside)
        if outside.endswith(_SCALE) or (form is not None and form.bits != 8):  # for runs of elements here
            return state
        paired = param.is_complex() and state.is_floating_point() and state.dim() > param.dim()
        engine, tensor_id = self._tensor_refs[place]
        tensor = engine.tensors[tensor_id]
        axes = {} if tensor.bucket is None else {b.name: b.axes.letters for b in tensor.bucket.program.states}
        shown = torch.view_as_complex(state) if paired else state
        shape = tensor.shapes.get(name)
        where = param if shape is None else self._routes[place].param
        return as_dtensor(shown, where, tensor.view, axes.get(name, "bij"), shape)

    def formats(self, place: int) -> dict[str, Format]:
        """The formats of a parameter's quantized states, under torch's names; empty before its first step."""
        entry, routed = self._tensor_refs[place][0].group_rule.entry, self._routes[place].routed
        return {entry.outside(name, routed): form for name, form in self.formats_here(place).items()}

    def storage(self, place: int) -> dict[str, str]:
        """The dtype or format of each of a parameter's states, under torch's names; empty before its first step."""
        engine, tensor_id = self._tensor_refs[place]
        entry, routed = engine.group_rule.entry, self._routes[place].routed
        return {entry.outside(name, routed): word for name, word in engine.storage(tensor_id).items()}

    def formats_here(self, place: int) -> dict[str, Format]:
        """The same under the rule's names."""
        engine, tensor_id = self._tensor_refs[place]
        return engine.formats(tensor_id)

    def unbiased_here(self, place: int) -> dict[str, str]:
        """The rule's names of a parameter's states that are rounded at random, each with the word for it."""
        engine, tensor_id = self._tensor_refs[place]
        return {name: word for name, word in engine.storage(tensor_id).items() if word == UNBIASED}

    def rounds(self, place: int) -> bool:
        """Whether a step rounds a parameter or a state of it at random."""
        engine, tensor_id = self._tensor_refs[place]
        return engine.rounds(tensor_id)

    def fill(self, saved: Mapping[int, Mapping[str, Any]]) -> None:
        """Copies saved values, by place, into the buffers."""
        with plain_memory(), real_memory():
            for place, values in saved.items():
                self._fill(place, values)

    def _fill(self, place: int, saved: Mapping[str, Any]) -> None:
        known = {key: buffer for key, buffer in self._of(place).items() if key in saved and not is_fake(buffer)}
        for key, buffer in known.items():
            fill(buffer, torch.as_tensor(saved[key], device=_device_of(saved[key])), self._routes[place].name)
        if known and not self._counted(place):
            # torch keeps no count here, and asks no more than whether there was a step before. bitsandbytes has one.
            self.written(place)["step"].fill_(saved["step"] if is_count(saved.get("step")) else 1)

    def show(self) -> None:
        """Puts every buffer into the store; other values there stay."""
        for engine in self._engines:
            engine.published = engine.extensions
        states: list[ShownState] = []
        fused: dict[int, dict[str, Tensor]] = {}
        for place, route in enumerate(self._routes):
            formats = self.formats(place)
            buffers = coded_names(self._of(place), formats)
            if buffers:
                states += self._shown_states(place, buffers)
                if route.section is not None:
                    fused.setdefault(route.place, {}).update(_of_number(buffers, route.section.number))
                    continue
                if formats and is_flat(route.param):
                    keys = {name: form.key for name, form in formats.items()}
                    self.store.show_sections(route.param, buffers, partial(saved_states, buffers, keys, route.param))
                    continue
                entry = self.store.entry(route.param)
                for name in [n for n in entry if n in formats or ((is_coded(n) or is_part(n)) and n not in buffers)]:
                    del entry[name]
                entry.take(buffers)
        for places in self._fused:
            route = self._routes[places[0]]
            if route.place in fused:
                self.store.show_sections(route.param, fused[route.place], partial(self._joined_of, places))
        self._show_formats()
        if not self.addresses.has(states):  # entries of histories only change their places
            self.addresses = StateAddresses(states)
        self.store.edits.changed = False

    def _shown_states(self, place: int, buffers: Mapping[str, Tensor]) -> list[ShownState]:
        """The states at a place, with their buffers as they are shown, in the same order."""
        param = self._routes[place].place
        arrays = [array for name, array in self.written(place).items() if name != "step" or self._counted(place)]
        return [
            ShownState(place, param, name, array, shown, local_tensor(shown))
            for array, (name, shown) in zip(arrays, buffers.items(), strict=True)
        ]

    def follow(self) -> bool:
        """Has kernels write the states where others have moved them.

        False, and nothing done, where more than an address is new, or one step count lies apart from the others.
        """
        states = self.addresses.states
        names = [f"{state.name} of {self._routes[state.place].name}" for state in states]
        for state, name in zip(states, names, strict=True):
            check_state_memory(state.shown, name)
        arrays = [state.now() for state in states]
        if [*map(facts_of, arrays)] != self.addresses.facts:
            return False
        check_apart([*(route.here for route in self._routes), *arrays], [*(r.name for r in self._routes), *names])
        now = {id(state.array): array for state, array in zip(states, arrays, strict=True)}
        for engine in self._engines:
            places = [(place, i) for place, (tensor_ref, i) in enumerate(self._tensor_refs) if tensor_ref is engine]
            held = {i: self.written(place) for place, i in places}  # entries of histories may have other names by now
            at = {i: {k: now[id(x)] for k, x in each.items() if id(x) in now} for i, each in held.items()}
            if not engine.relocate({i: each for i, each in at.items() if each}):
                return False
        self.show()
        return True

    def _show_formats(self) -> None:
        """Puts the formats of states, bfloat16_sr too, into the groups; groups without such states have none."""
        keys: dict[int, dict[str, str]] = {}
        for place, route in enumerate(self._routes):
            of_group = keys.setdefault(route.group, {})
            of_group |= {name: word for name, word in self.storage(place).items() if word == UNBIASED}
            of_group |= {name: form.key for name, form in self.formats(place).items()}
        for group, formats in keys.items():
            if formats:
                self._groups[group][FORMATS] = formats
            else:
                self._groups[group].pop(FORMATS, None)

    def written(self, place: int) -> dict[str, Tensor]:
        """A parameter's states by the rule's names, and its count as `step`; empty before its first step."""
        engine, tensor_id = self._tensor_refs[place]
        return engine.state(tensor_id)

    def _of(self, place: int) -> dict[str, Tensor]:
        """A parameter's buffers under torch's names, complex for a complex parameter; empty before its first step."""
        route, entry = self._routes[place], self._tensor_refs[place][0].group_rule.entry
        buffers = {}
        for name, value in self.written(place).items():
            if name != "step" or self._counted(place):
                outside = entry.outside(name, route.routed)
                buffers[outside] = self._shown(place, name, outside, value)
        return buffers

    def _counted(self, place: int) -> bool:
        """Whether torch's layout has a step count of the parameter."""
        return self._tensor_refs[place][0].group_rule.entry.counted or self._routes[place].routed


def _check_whole(buffers: Mapping[str, Tensor], saved: Mapping[str, Any], name: str) -> None:
    """StateMismatch where a state of a parameter was saved for its sections alone."""
    apart = [key for key in buffers if key not in saved and of_section(key, 0) in saved]
    if apart:
        raise StateMismatch(
            f"the saved state of {name} has {of_section(apart[0], 0)} of its sections, and {name} is not split here: "
            f"give its group the split that it had, or load the state_dict() of then"
        )


def _of_number(buffers: Mapping[str, Tensor], number: int) -> dict[str, Tensor]:
    """The buffers of the section with this number under the names of its parameter."""
    return {of_section(name, number) if number or name != "step" else name: x for name, x in buffers.items()}


def _device_of(value: Any) -> torch.device:
    """The device of a saved value; the CPU for a number, whatever torch's default device."""
    return value.device if isinstance(value, Tensor) else torch.device("cpu")
