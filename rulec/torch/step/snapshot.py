"""Parameters and groups at the last look, and the changes since: every step asks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from itertools import chain
from operator import is_
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from rulec.torch.fastpath.survey import Survey
from rulec.torch.groups.capture import NEW_NUMBERS, NEW_TENSORS, CaptureMode, is_asked
from rulec.torch.groups.entries import GroupRule
from rulec.torch.groups.interface import Interface
from rulec.torch.groups.options import Options
from rulec.torch.groups.values import Groups, GroupValues, group_rules_of, splits_of, words_of
from rulec.torch.tensors.dtensor import is_dtensor, local_tensor, placement_of, spec_of
from rulec.torch.tensors.fake import address_of
from rulec.torch.tensors.memory import Spans, check_memory, holds_all
from rulec.torch.tensors.tensors import Guard, check_apart, check_parameters, guard_for, never


class Change(Enum):
    """One kind of change: other parameters, other memory of the same ones, or other values in the groups."""

    PARAMETERS = "parameters"
    MEMORY = "memory"
    VALUES = "values"


class Snapshot:
    """The parameters of some groups, where they lie in memory, and the groups' values.

    `names` are the parameters' in messages. TensorError for parameters that no kernel can update.
    """

    def __init__(
        self, interface: Interface, groups: Groups, options: Options, capture_mode: CaptureMode, names: Sequence[str]
    ) -> None:
        self._interface, self._options, self._capture_mode, self._names = interface, options, capture_mode, names
        self.params: list[Tensor] = [p for group in groups for p in group["params"]]
        self.sizes = [len(group["params"]) for group in groups]
        self._locals = any(map(is_dtensor, self.params))
        self._address = address_of(self._here)
        self._values = GroupValues(interface.group_keywords, groups, self._live)
        self._flags = GroupValues(interface.flag_keywords, groups)
        self._words = words_of(groups)
        self._splits = splits_of(groups)
        check_parameters(self.params, names)
        self._addresses = [*map(self._address, self._here)]
        self._facts = [_facts(p) for p in self.params]
        self._spans = Spans(self._here)
        self._specs = [*map(spec_of, self.params)]
        self._plain = {Tensor, Parameter}.issuperset(map(type, self._here))
        self._guard: Guard = never
        self._doubted = False
        self._guards_left = 4

    @property
    def _live(self) -> Callable[[Any], bool] | None:
        """Which hyper-parameters are read on the device; None where none can be."""
        return self._capture_mode.is_live if self._capture_mode.scales else None

    @property
    def lists(self) -> list[list[Any]]:
        """The groups' lists of parameters, at the last look."""
        return self._values.lists

    @property
    def _here(self) -> list[Tensor]:
        """The local tensors of DTensors, and the other parameters."""
        return [*map(local_tensor, self.params)] if self._locals else self.params

    def changes(self, groups: Groups, survey: Survey | None = None) -> list[Change]:
        """The changes since the last look; after other parameters nothing else is looked at."""
        same, lists = self._values.same(groups) and not self._doubted, self._values.lists
        surveyed = survey is not None and survey.look(lists)
        if not surveyed and self._has_others(lists):
            return [Change.PARAMETERS]
        if self._interface.sees_sections and splits_of(groups) != self._splits:
            return [Change.PARAMETERS]
        moved = not surveyed and self._has_moved()
        return [*((Change.MEMORY,) if moved else ()), *(() if same else (Change.VALUES,))]

    def _has_others(self, lists: Sequence[list[Any]]) -> bool:
        """Whether the groups have other parameters."""
        return [*map(len, lists)] != self.sizes or not all(map(is_, chain.from_iterable(lists), self.params))

    def _has_moved(self) -> bool:
        """Whether a parameter has another address, too little memory, or other facts.

        The next look may ask all at once.
        """
        here = self._here
        if [*map(self._address, here)] != self._addresses:
            return True
        if not (self._spans.are_held(here) or all(map(holds_all, here))):
            return True
        placed = self._locals and not all(map(is_, map(spec_of, self.params), self._specs))
        return self._plain and (placed or not self._guard(*here)) and not self._unaltered()

    def doubt(self) -> None:
        """Has the next look find other values: engines have taken some that this object does not know."""
        self._doubted = True

    def _unaltered(self) -> bool:
        """Whether each parameter has its shape, memory order, dtype and device; the next look may ask all at once."""
        if self.altered() is not None:
            return False
        if self._guards_left:
            self._guards_left -= 1
            self._guard, self._specs = guard_for(self._here), [*map(spec_of, self.params)]
        return True

    def moved(self, places: Iterable[int]) -> bool:
        """Whether a parameter with one of these indices has another address, shape, memory order or dtype.

        Also where its storage lost some of the memory that it needs.
        """
        here = [(self.params[i], i) for i in places]
        return any(
            self._address(local_tensor(p)) != self._addresses[i] or _facts(p) != self._facts[i]
            or not holds_all(local_tensor(p))
            for p, i in here
        )  # fmt: skip

    def altered(self) -> int | None:
        """The first index of a parameter with another shape, memory order, dtype or device; None for none."""
        return next((place for place, facts in enumerate(self._facts) if _facts(self.params[place]) != facts), None)

    def take_memory(self) -> list[int]:
        """Takes over the parameters' addresses, where no more has changed; the indices of the moved parameters.

        TensorError where a storage lacks memory.
        """
        self._capture_mode.check_capture(NEW_TENSORS)
        now = [*map(self._address, self._here)]
        moved = [place for place, pair in enumerate(zip(self._addresses, now, strict=True)) if pair[0] != pair[1]]
        for param, name in zip(self.params, self._names, strict=True):
            check_memory(param, name)
        check_apart(self.params, self._names)
        self._addresses = now
        return moved

    def take_values(self, groups: Groups, group_rules: Sequence[GroupRule]) -> bool:
        """Takes over the groups' values; False where these no longer mean the rules, random numbers or memory."""
        self._capture_mode.check_capture(NEW_NUMBERS)
        decaying = {group_rule.entry for group_rule in group_rules if group_rule.decay}
        if not self._flags.same(groups):
            if group_rules_of(self._interface, groups, decaying) != group_rules or words_of(groups) != self._words:
                return False
            if is_asked(groups, self._options) != self._capture_mode.asked:
                return False
            self._flags = GroupValues(self._interface.flag_keywords, groups)
        self._values, self._doubted = GroupValues(self._interface.group_keywords, groups, self._live), False
        return True


def _facts(param: Tensor) -> tuple[Any, ...]:
    here = local_tensor(param)
    placed = (param.shape, *placement_of(param)) if here is not param else ()
    return here.shape, here.stride(), here.dtype, here.device, here.is_neg(), here.is_conj(), *placed
