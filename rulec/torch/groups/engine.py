"""The engines of an optimizer: one for each rule of its groups, with the current hyper-parameters of these groups.

A steady step takes over changed numbers only: a schedule changes one of them before every step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

from torch import Tensor

from rulec.errors import HyperError
from rulec.runtime.buckets.reductions import Processes
from rulec.runtime.engine import Engine
from rulec.torch.distributed.mesh import whole_of
from rulec.torch.groups.capture import CaptureMode
from rulec.torch.groups.entries import GroupRule
from rulec.torch.groups.interface import Interface
from rulec.torch.groups.options import Options
from rulec.torch.groups.routes import Route
from rulec.torch.groups.values import NUMBERS, STEADY, Groups, live_values, seed_of, table_of
from rulec.torch.tensors.dtensor import has_matrices
from rulec.torch.tensors.tensors import TorchArrays


class TorchEngine(Engine):
    """The engine of all groups with one rule.

    `indices` are the indices of these groups among the optimizer's, in the engine's order. `table` has their
    hyper-parameters now, by name and group, in float64. `published` is the number of extensions when the optimizer's
    state last showed the buffers.
    """

    def __init__(
        self, group_rule: GroupRule, indices: Sequence[int], groups: Groups, options: Options,
        capture_mode: CaptureMode, arrays: TorchArrays,
    ) -> None:  # fmt: skip
        on_host = options.offload is not None and options.offload.kind == "step"
        super().__init__(
            group_rule.rule, arrays, options.backend, state_dtypes_of(group_rule, options),
            seed=options.seed or seed_of(groups), resident=capture_mode.asked,
            processes=Processes(options.across, indices, len(groups), options.coordinator), weights=options.weights,
            watch=options.watch, exclusive=on_host,
            begins=on_host and options.offload is not None and options.offload.backward,
        )  # fmt: skip
        self.group_rule, self.indices, self.published = group_rule, indices, 0
        self.take_numbers(groups, capture_mode)

    def take_numbers(self, groups: Groups, capture_mode: CaptureMode) -> None:
        """Takes over the hyper-parameters of its groups, of all these groups."""
        chosen = [groups[i] for i in self.indices]
        self.table = table_of(self.group_rule, chosen)
        self.live = live_values(capture_mode, self.group_rule, chosen)


#: The engine of a parameter, and the parameter's id there.
TensorRef: TypeAlias = tuple[TorchEngine, int]


def engines_of(
    interface: Interface, group_rules: Sequence[GroupRule], groups: Groups, options: Options,
    capture_mode: CaptureMode, arrays: TorchArrays,
) -> list[TorchEngine]:  # fmt: skip
    """The engines of groups with these rules, of tensors in `arrays`, still without parameters."""
    by_rule: dict[Any, list[int]] = {}
    for index, group_rule in enumerate(group_rules):
        by_rule.setdefault(group_rule.engine, []).append(index)
    if len(by_rule) > 1 and interface.shared:
        raise HyperError(
            f"{interface.name} keeps {min(interface.shared)} across groups, so they must agree on which "
            f"hyper-parameters are None"
        )
    return [
        TorchEngine(group_rules[indices[0]], indices, groups, options, capture_mode, arrays)
        for indices in by_rule.values()
    ]


def order_of(order: Sequence[int], count: int) -> list[int]:
    """The indices of `count` parameters or sections in this order; those without a place in it follow."""
    chosen = [place for place in order if place < count]
    return [*chosen, *sorted({*range(count)} - {*chosen})]


def in_order(engines: Sequence[TorchEngine], groups: Sequence[int]) -> list[TorchEngine]:
    """The engines in the order of these groups, of one parameter after the other."""
    first = {group: place for place, group in reversed([*enumerate(groups)])}
    return sorted(engines, key=lambda engine: min(first.get(index, len(groups)) for index in engine.indices))


def add_parameters(
    engines: Sequence[TorchEngine], group_rules: Sequence[GroupRule], routes: Sequence[Route], order: Sequence[int],
    tensors: Sequence[Tensor],
) -> list[TensorRef]:  # fmt: skip
    """Adds every parameter or section to the engine of its group, in an order; returns their references, by index.

    `tensors` has the tensors that kernels read and write, by route.
    """
    tensor_refs: dict[int, TensorRef] = {}
    places = {index: sorted({r.place for r in routes if r.group == index}) for index in {r.group for r in routes}}
    numbers = {place: (i, len(each)) for each in places.values() for i, place in enumerate(each)}
    of_group = {index: (engine, column) for engine in engines for column, index in enumerate(engine.indices)}
    for number, place in enumerate(order):
        route = routes[place]
        engine, column = of_group[route.group]
        maximize = group_rules[route.group].maximize
        whole = whole_of(route.param, has_matrices(route.rule), route.section)
        tensor_refs[place] = (
            engine,
            engine.add(
                tensors[place],
                column,
                route.name,
                route.tags,
                number,
                maximize,
                whole,
                numbers[route.place],
                route.layer,
            ),
        )
    return [tensor_refs[place] for place in range(len(routes))]


def state_dtypes_of(group_rule: GroupRule, options: Options) -> dict[str, str]:
    """The dtypes and formats asked for, by the rule's names of its states, `""` for all."""
    names = {state: _rule_state(group_rule, state) for state in options.state_dtypes}
    return {name: options.state_dtypes[state] for state, name in names.items() if name is not None}


def _rule_state(group_rule: GroupRule, name: str) -> str | None:
    """The rule's name for a state, called by that or by torch's; None for a state of another rule."""
    states = {state for rule in group_rule.entry.rules for state in rule.state}
    return name if name in {"", *states} else next((s for s in states if group_rule.entry.outside(s) == name), None)


class GroupNumbers:
    """The values in groups, as their engines have them.

    `doubt` is called before engines take new ones, for who else remembers values.
    """

    def __init__(
        self, groups: Groups, interface: Interface, engines: Sequence[TorchEngine], doubt: Callable[[], None]
    ) -> None:
        self._groups, self._engines, self._doubt = groups, engines, doubt
        self._keys = [[*group] for group in groups]
        self._values = [[*group.values()] for group in groups]
        self._known = frozenset(interface.group_keywords)
        self._numeric = self._known.difference(interface.flag_keywords)
        self._has_sections = interface.sees_sections
        #: How often engines have taken new numbers.
        self.version = 0
        whens = [entry.when.get("weight_decay", "nonzero") for entry in interface.entries]
        #: Whether all rules are alike for any two weight decays but 0.
        self._decays = all(when in ("nonzero", 0) for when in whens)

    def are_steady(self) -> bool:
        """Whether no value under these keys can change while it is the same object."""
        return _are_steady(group[key] for group in self._groups for key in self._known)

    def take(self) -> bool:
        """Takes new values over, as equal numbers may be; False where there are none, or more than numbers is new.

        HyperError where one is out of its range.
        """
        new = self._new()
        if not new:
            return False
        if any(value != self._values[i][place] for i, place, value in new if self._keys[i][place] in self._known):
            self._take_tables()
        for i, place, value in new:
            self._values[i][place] = value
        return True

    def _take_tables(self) -> None:
        self._doubt()
        for engine in self._engines:
            table = table_of(engine.group_rule, [self._groups[i] for i in engine.indices])
            engine.take_table(table)
            engine.table = table
        self.version += 1

    def _new(self) -> list[tuple[int, int, Any]]:
        """The new values by group and index; none where something else than values is to be taken over."""
        new: list[tuple[int, int, Any]] = []
        if len(self._groups) != len(self._keys):
            return new
        for i, (group, keys, values) in enumerate(zip(self._groups, self._keys, self._values, strict=True)):
            now = [*group.values()]
            if len(now) != len(values) or [*group] != keys:
                return []
            for place, (before, value) in enumerate(zip(values, now, strict=True)):
                if before is not value:
                    if not self._may_become(keys[place], before, value):
                        return []
                    new.append((i, place, value))
        return new

    def _may_become(self, key: str, before: Any, value: Any) -> bool:
        """Whether a value may take the place of another under this key, with the same rule and memory."""
        if key not in self._known:
            return key != "params" and not self._has_sections
        if type(before) is tuple and type(value) is tuple:
            return key in self._numeric and len(before) == len(value) and NUMBERS.issuperset(map(type, value))
        if type(before) not in NUMBERS or type(value) not in NUMBERS:
            return False
        return key in self._numeric or (key == "weight_decay" and self._decays and before != 0 != value)


def _are_steady(values: Iterable[Any]) -> bool:
    return all(type(v) in STEADY or (type(v) is tuple and _are_steady(v)) for v in values)
