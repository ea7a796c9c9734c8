"""The values of parameter groups: their rules, numbers and flags, a table of hyper-parameters, and states of groups.

States of a group or of the whole model are numbers in the groups' dicts, where users and checkpoints find them. A
group's state is under its name in the group (`optimizer.param_groups[0]["d"]`). A state of the whole model is in all
groups alike. The number of steps of the group, or of the model, is beside it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from operator import is_, itemgetter
from types import NoneType
from typing import Any

import numpy as np
from torch import Tensor

from rulec.errors import HyperError, RulecError, StateMismatch
from rulec.language.hyper import AT_START, checked_seed, followers, rate_ratio
from rulec.runtime.buckets.scalar_table import Numbers
from rulec.runtime.buckets.scalar_table_device import Product
from rulec.runtime.engine import Engine
from rulec.torch.groups.capture import CaptureMode
from rulec.torch.groups.entries import Entry, GroupRule
from rulec.torch.groups.interface import CHOOSING, COUNTS, SPLITTING, Interface, torch_words
from rulec.torch.tensors.fake import is_fake

Groups = Sequence[Mapping[str, Any]]

#: Types of immutable values, and of a learning rate that is no tensor.
STEADY = frozenset({float, int, np.float64, np.float32, bool, str, NoneType})

#: Numbers among them.
NUMBERS = frozenset({float, int, np.float64, np.float32})


def never_live(value: Any) -> bool:
    """Always returns False: a hyper-parameter is read on the host."""
    return False


class GroupValues:
    """The values of all groups under some keywords, and the lists of their parameters.

    `live` says whether a value may change in its memory, as a tensor does: steps then read it there. It is None if no
    value of the groups is of this kind.
    """

    def __init__(self, names: Sequence[str], groups: Groups, live: Callable[[Any], bool] | None = None) -> None:
        self._get = itemgetter("params", *names)
        self._rate = 1 + names.index("lr") if "lr" in names else None
        self._known = [*map(self._get, groups)]
        values = chain.from_iterable([group[name] for group in groups] for name in names)
        self._steady = _steady([*values], live or never_live)
        self._kinds_of = self._rate_types if live is None else _kinds
        self._kinds = self._kinds_of(self._known)
        self.lists: list[list[Any]] = [known[0] for known in self._known]

    def same(self, groups: Groups) -> bool:
        """Whether nothing was changed since these were read; also False where a comparison cannot decide it.

        Afterwards `lists` are the groups' lists of parameters now; what is in them is not looked at.
        """
        now = [*map(self._get, groups)]
        before, self.lists = self.lists, [values[0] for values in now]
        # A tensor may equal the number, or the other tensor, that it took the place of. What is live is not compared
        # with anything either: that would be waited for. A list is equal to itself without a look at its tensors.
        alike = len(before) == len(now) and all(map(is_, before, self.lists))
        return self._steady and alike and self._kinds_of(now) == self._kinds and _equal(now, self._known)

    def _rate_types(self, known: Sequence[Any]) -> list[Any]:
        """The type of each learning rate: the schedulers of torch change tensors in place."""
        return [] if self._rate is None else [type(values[self._rate]) for values in known]


def _kinds(known: Sequence[Any]) -> list[Any]:
    """The type of each value, and of each part of a tuple; the identity of values without a comparison."""
    parts = [part for values in known for value in values[1:] for part in (value if type(value) is tuple else (value,))]
    return [type(part) if type(part) in STEADY else id(part) for part in parts]


def _equal(a: Any, b: Any) -> bool:
    """Whether both are equal; not where that is a question about the elements of tensors or arrays."""
    try:
        return bool(a == b)
    except (RuntimeError, ValueError):
        return False


def _steady(values: Sequence[Any], live: Callable[[Any], bool]) -> bool:
    if STEADY.issuperset(map(type, values)):
        return True
    others = [value for value in values if type(value) not in STEADY]
    return all(live(value) or (type(value) is tuple and _steady(value, live)) for value in others)


def group_rules_of(interface: Interface, groups: Groups, decaying: Collection[Entry] = ()) -> list[GroupRule]:
    """The rule that each group means; HyperError where one means none, or a hyper-parameter is out of its range.

    If `weight_decay` is 0 in all groups of an entry the rule is the one without it, unless among `decaying`.
    """
    rules = [interface.choose(group) for group in groups]
    for group_rule, group in zip(rules, groups, strict=True):
        _check_ranges(group_rule, group, interface.name)
    used = {c.entry for c, g in zip(rules, groups, strict=True) if c.decay and g["weight_decay"] != 0}
    return [c if c.entry in used or c.entry in decaying else replace(c, decay="") for c in rules]


def _check_ranges(group_rule: GroupRule, group: Mapping[str, Any], owner: str) -> None:
    for name, hyper in group_rule.settings.items():
        value = group_rule.number(name, group)
        try:
            if value is not None:
                hyper.check(name, value, owner)
        except HyperError as error:
            keyword, _ = group_rule.entry.place(name)
            raise HyperError(f"{error}{torch_words(owner, keyword, group[keyword])}") from None
    group_rule.hyper(group)


def note_start(interface: Interface, group: dict[str, Any]) -> None:
    """Writes the learning rate at the start into a new group whose rule has a use for it.

    It is the `initial_lr` of a scheduler, if there is one. A group with a mistake stays as it is.
    """
    if group.get(AT_START, 0) is not None:
        return
    try:
        values = {**group, "lr": group.get("initial_lr", group.get("lr"))}
        group[AT_START] = interface.choose(values).hyper(values)[AT_START]
    except (RulecError, KeyError):
        return


def table_of(group_rule: GroupRule, groups: Groups) -> Numbers:
    """The hyper-parameters of groups that mean the same rule, by name and group, in float64.

    Second learning rates have followed `lr`.
    """
    table = _numbers_of(group_rule, groups)
    if second := followers(group_rule.settings):
        lines = dict(zip(group_rule.settings, table, strict=True))
        factors = [rate_ratio(*rates) for rates in zip(lines["lr"], lines[AT_START], strict=True)]
        for name in second:
            lines[name] *= factors
    return table


def _numbers_of(group_rule: GroupRule, groups: Groups) -> Numbers:
    """The hyper-parameters as the groups have them."""
    entry, lines = group_rule.entry, []
    for name in group_rule.settings:
        keyword, position = entry.place(name)
        numbers = [group[keyword] for group in groups]
        if position is not None and all(type(value) is tuple and len(value) > position for value in numbers):
            numbers = [value[position] for value in numbers]
        if not NUMBERS.issuperset(map(type, numbers)):
            # Tensors, None for a default, or a mistake.
            return np.array([[*group_rule.hyper(group).values()] for group in groups], np.float64).T.copy()
        lines.append(numbers)
    return np.array(lines, np.float64).reshape(len(lines), len(groups))


def live_values(
    capture_mode: CaptureMode, group_rule: GroupRule, groups: Sequence[Mapping[str, Any]]
) -> dict[tuple[str, int], Tensor | Product]:
    """The hyper-parameters that are read on the device, of groups with one rule, by name and group."""
    live: dict[tuple[str, int], Tensor | Product] = {}
    if not capture_mode.scales:  # then it reads none there
        return live
    for name in group_rule.settings:
        keyword, position = group_rule.entry.place(name)
        for column, group in enumerate(groups):
            value = _part(group[keyword], position)
            if capture_mode.is_live(value):
                live[name, column] = value
    for name in followers(group_rule.settings):
        for column, group in enumerate(groups):
            place = group_rule.entry.place(name)[0]
            arrays = [group[key] for key in ("lr", place) if capture_mode.is_live(group[key])]
            start = 0.0 if group[AT_START] is None else float(group[AT_START])
            if arrays and start > 0:
                factor = math.prod(float(group[key]) for key in ("lr", place) if not capture_mode.is_live(group[key]))
                live[name, column] = Product(factor / start, arrays)
    return live


def _part(argument: Any, position: int | None) -> Any:
    """A keyword's value, or the part at a position of a tuple; None where the tuple is shorter."""
    if position is None or not isinstance(argument, tuple | list):
        return argument
    return argument[position] if position < len(argument) else None


def words_of(groups: Groups) -> list[list[Any]]:
    """The groups' words for their tensors' rules, and the seeds of their random numbers."""
    return [[group.get(key) for key in CHOOSING] for group in groups]


def splits_of(groups: Groups) -> list[list[Any]]:
    """The split of each group, and its dimension."""
    return [[group.get(key) for key in SPLITTING] for group in groups]


def seed_of(groups: Groups) -> int:
    """The seed of random numbers, which is one for the whole optimizer; HyperError where it is none."""
    seeds = {checked_seed(group.get("seed", 0)) for group in groups}
    if len(seeds) > 1:
        raise HyperError(f"seed is one for all groups, and they have {', '.join(map(repr, seeds))}: give all the same")
    return min(seeds, default=0)


class GroupStates:
    """The numbers of one engine over all groups, in order; `levels` has name -> `group` or `model`."""

    def __init__(self, levels: Mapping[str, str], engine: Engine) -> None:
        self.levels, self.engine = levels, engine
        self._names = [*levels, *(COUNTS[level] for level in dict.fromkeys(levels.values()))]
        self._published: list[Any] = []
        self._views: dict[tuple[int, int], Any] = {}

    def changed(self, groups: Sequence[Mapping[str, Any]]) -> bool:
        """Whether the groups say something else than was published."""
        return bool(self.engine.shared.values) and not _same(self._shown_numbers(groups), self._published)

    def read(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Takes over the groups' numbers; others stay. StateMismatch for what cannot be."""
        if not self.changed(groups):
            return
        for name, level in self.levels.items():
            values = {i: _number(group[name], name) for i, group in enumerate(groups) if name in group}
            for i, value in (values if level == "group" else _agreed(values, name)).items():
                self.engine.shared.values[name][i] = value
        self._read_counts(groups)

    def _read_counts(self, groups: Sequence[Mapping[str, Any]]) -> None:
        for i, group in enumerate(groups):
            if COUNTS["group"] in group:
                self.engine.shared.group_t[i] = _number(group[COUNTS["group"]], COUNTS["group"])
        key = COUNTS["model"]
        for value in _agreed({i: _number(g[key], key) for i, g in enumerate(groups) if key in g}, key).values():
            self.engine.shared.model_t[0] = value

    def publish(self, groups: Sequence[dict[str, Any]]) -> None:
        """Shows the numbers in the groups."""
        shared = self.engine.shared
        if not shared.values:
            return
        for i, group in enumerate(groups):
            for name, level in self.levels.items():
                group[name] = self._shown(shared.values[name], i if level == "group" else 0, float)
            if "group" in self.levels.values():
                group[COUNTS["group"]] = self._shown(shared.group_t, i, int)
            if "model" in self.levels.values():
                group[COUNTS["model"]] = self._shown(shared.model_t, 0, int)
        self._published = self._shown_numbers(groups)

    def _shown(self, numbers: Any, i: int, kind: Callable[[Any], Any]) -> Any:
        """A number as Python's, or, where it is on a device, as a view that is always the same."""
        if not isinstance(numbers, Tensor):
            return kind(numbers[i])
        key = id(numbers), i
        if key not in self._views:
            self._views[key] = numbers[i]
        return self._views[key]

    def _shown_numbers(self, groups: Sequence[Mapping[str, Any]]) -> list[Any]:
        return [group.get(name) for group in groups for name in self._names]


def _same(shown: Sequence[Any], published: Sequence[Any]) -> bool:
    """Whether all are what was published: tensors the same ones, numbers equal."""
    if len(shown) != len(published):
        return False
    pairs = zip(shown, published, strict=True)
    return all(a is b or (not isinstance(a, Tensor) and not isinstance(b, Tensor) and a == b) for a, b in pairs)


def check_complete(levels: Mapping[str, str], groups: Sequence[Mapping[str, Any]]) -> None:
    """StateMismatch where saved groups lack a number that their tensors' states go with."""
    for name, level in levels.items():
        if not any(name in group for group in groups):
            raise StateMismatch(f"the saved groups have no {name}, which is kept per {level}: they are of another rule")


def _number(value: Any, name: str) -> float:
    try:
        return 0.0 if is_fake(value) else float(value)
    except (TypeError, ValueError, RuntimeError):
        raise StateMismatch(f"{name}={value!r} of a group must be a number") from None


def _agreed(values: Mapping[int, float], name: str) -> dict[int, float]:
    """The one value of all groups, at index 0."""
    if len({*values.values()}) > 1:
        listed = ", ".join(f"{v:g}" for v in values.values())
        raise StateMismatch(f"{name} is one number of the whole model, and its groups have {listed}: give all the same")
    return {0: next(iter(values.values()))} if values else {}
