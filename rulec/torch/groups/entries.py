"""One rule that a class of torch may mean, and torch's names for its hyper-parameters and states."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from rulec.compiler.routing import Router
from rulec.compiler.scalars import resolve_hyper
from rulec.errors import HyperError
from rulec.language import rule_data
from rulec.language.compose.combine import substitute_hyper
from rulec.language.expr.node import Kind, Node, Op, names_in, walk
from rulec.language.hyper import AT_START, Hyper
from rulec.language.library.load import CORRECTED, decayed, transformed
from rulec.language.rule import Rule
from rulec.language.sizes import entries, lists_of, sized

#: Values of keywords that torch takes as their default, None.
AS_NONE = {"adjust_lr_fn": "original"}

#: Where a hyper-parameter's value is: a keyword, and the place in it where that is a tuple.
Place = tuple[str, int | None]


@dataclass(frozen=True)
class GroupRule:
    """The rule that a group's flags mean: an entry of the class, the transform of `weight_decay`, and the direction.

    `unset` are hyper-parameters left to a default that follows from each parameter's dtype, `transforms` those of the
    library that flags ask for.
    """

    entry: Entry
    decay: str
    maximize: bool
    unset: frozenset[str] = frozenset()
    transforms: tuple[str, ...] = ()

    @property
    def rule(self) -> Rule:
        """The rule to run."""
        return self.entry.composed(self.decay, self.unset, self.transforms)

    @property
    def settings(self) -> Mapping[str, Hyper]:
        """The hyper-parameters of the rule, and of the rules for tensors outside its condition."""
        return self.entry.settings(self.decay, self.unset, self.transforms)

    @property
    def engine(self) -> tuple[Entry, str, frozenset[str], tuple[str, ...]]:
        """The part that all groups of one engine share."""
        return self.entry, self.decay, self.unset, self.transforms

    def hyper(self, values: Mapping[str, Any]) -> dict[str, float]:
        """The rule's hyper-parameters from a group's keywords."""
        settings = self.settings
        numbers = {name: self.number(name, values) for name in settings}
        known = {name: value for name, value in numbers.items() if value is not None}
        if len(known) == len(numbers):
            return known
        return resolve_hyper(settings, known, torch.finfo(torch.float32).eps, self.rule.name)

    def number(self, name: str, values: Mapping[str, Any]) -> float | None:
        """The value given; None where the rule's default is an expression of others and nothing else was given."""
        keyword, position = self.entry.place(name)
        argument, derived = values[keyword], isinstance(self.settings[name].default, Node)
        try:
            if derived and position is not None and position == len(argument):
                return None  # the last of a tuple may be left out
            if position is not None and len(argument) > sum(k == keyword for k, _ in self.entry.places.values()):
                raise ValueError
            value = argument if position is None else argument[position]
            if value is None and derived:
                return None
            return float(value)
        except (TypeError, ValueError, IndexError, KeyError, RuntimeError):
            if position is None and isinstance(argument, torch.Tensor) and argument.numel() != 1:
                raise HyperError(
                    f"Tensor {keyword} must be 1-element, and {keyword} of {self.rule.name} has shape "
                    f"{tuple(argument.shape)}: give a number, or a tensor of one"
                ) from None
            count = sum(k == keyword for k, _ in self.entry.places.values())
            wanted = "a number" if position is None else f"{count} numbers"
            raise HyperError(f"{keyword}={argument!r} of {self.rule.name} must be {wanted}") from None


@dataclass(frozen=True, eq=False)
class Entry:
    """One rule that a class may mean.

    `when` are the keywords' values that choose it (`nonzero` is any number but 0, `given` any but None). `places`
    has hyper-parameter -> keyword and position, `states` the rule's name of a state -> torch's. `decays` has flag
    -> the transform that `weight_decay` stands for with it: `not FLAG` where the flag is off, `default` without a
    flag; the first that holds counts. `transforms` has flag -> the transform of the library that it puts before or
    around the rule. `counted` says whether torch's state has a step count, and `takes_rows` whether torch takes
    sparse gradients.
    """

    owner: str
    rule: Rule
    when: Mapping[str, Any] = field(default_factory=dict)
    places: Mapping[str, Place] = field(default_factory=dict)
    states: Mapping[str, str] = field(default_factory=dict)
    decays: Mapping[str, str] = field(default_factory=dict)
    transforms: Mapping[str, str] = field(default_factory=dict)
    counted: bool = True
    takes_rows: bool = False

    def sized(self, values: Mapping[str, Any]) -> Entry:
        """The entry for the lengths in a group's keywords; the same object where its rule has these lengths."""
        lengths = {} if self.rule.sizes is None else {**self.rule.sizes.lists, **self.rule.sizes.counts}
        rule, _ = sized(self.rule, {key: value for key, value in values.items() if key in lengths})
        if rule is self.rule:
            return self
        places = {name: place for name, place in self.places.items() if place[0] not in lengths}
        return replace(self, rule=rule, places=places | list_places(rule))

    @functools.cached_property
    def rules(self) -> Sequence[Rule]:
        """The rule, and the rules it names for tensors outside its condition."""
        return Router(self.rule).rules

    def place(self, name: str) -> Place:
        """The keyword of a hyper-parameter, and the position in it; by default that of the hyper-parameter's name."""
        return self.places.get(name, (name, None))

    @property
    def keywords(self) -> set[str]:
        """Every keyword that means something to this rule."""
        names = {self.place(name)[0] for name in self.settings("")}
        decaying = {"weight_decay"} if self.decays else set()
        decaying |= {AT_START} if CORRECTED in self.decays.values() else set()
        return names | {*self.when} | decaying | self.flags

    @functools.cached_property
    def flags(self) -> set[str]:
        """The keywords that choose transforms."""
        return {flag.removeprefix("not ") for flag in self.decays if flag != "default"} | {*self.transforms}

    @functools.cached_property
    def by_dtype(self) -> frozenset[str]:
        """The hyper-parameters whose default follows from the parameter's dtype."""
        defaults = {name: hyper.default for name, hyper in self.rule.hyper.items()}
        return frozenset(n for n, d in defaults.items() if isinstance(d, Node) and "machine_eps" in names_in([d]))

    @property
    def unset_keywords(self) -> set[str]:
        """The keywords whose None leaves a default to each parameter's dtype."""
        return {self.place(name)[0] for name in self.by_dtype}

    def group_rule(self, values: Mapping[str, Any]) -> GroupRule:
        """This rule as a group's keywords want it."""
        unset = frozenset(name for name in self.by_dtype if self._argument(name, values) is None)
        transforms = tuple(transform for flag, transform in self.transforms.items() if values.get(flag))
        return GroupRule(self, self.decay(values), bool(values.get("maximize")), unset, transforms)

    def _argument(self, name: str, values: Mapping[str, Any]) -> Any:
        keyword, position = self.place(name)
        argument = values[keyword]
        if position is None:
            return argument
        return argument[position] if isinstance(argument, tuple | list) and len(argument) > position else 0

    def matches(self, values: Mapping[str, Any]) -> bool:
        """Whether these keywords mean this rule."""
        values = {key: None if value == AS_NONE.get(key, self) else value for key, value in values.items()}
        return all(_fits(values[keyword], value) for keyword, value in self.when.items())

    def decay(self, values: Mapping[str, Any]) -> str:
        """The transform that `weight_decay` stands for; empty where the rule has its own."""
        for flag, transform in self.decays.items():
            name = flag.removeprefix("not ")
            if flag != "default" and bool(values.get(name)) is (name == flag):
                return transform
        return self.decays.get("default", "")

    def outside(self, state: str, routed: bool = False) -> str:
        """torch's name of a state; where the tensor is `routed` to another rule, that rule's own name."""
        name, *scale = state.partition("::")
        return state if routed else "".join([self.states.get(name, name), *scale])

    @functools.cached_property
    def _composed(self) -> dict[Any, tuple[Rule, Mapping[str, Hyper]]]:
        return {}

    def composed(self, decay: str, unset: frozenset[str] = frozenset(), transforms: tuple[str, ...] = ()) -> Rule:
        """The rule with these transforms and weight decay, under the class's name; always the same object."""
        return self._compose(decay, unset, transforms)[0]

    def settings(
        self, decay: str, unset: frozenset[str] = frozenset(), transforms: tuple[str, ...] = ()
    ) -> Mapping[str, Hyper]:
        """The hyper-parameters of `composed`, and of the rules that it routes tensors to."""
        return self._compose(decay, unset, transforms)[1]

    def _compose(
        self, decay: str, unset: frozenset[str], transforms: tuple[str, ...]
    ) -> tuple[Rule, Mapping[str, Hyper]]:
        key = decay, unset, transforms
        if key not in self._composed:
            whole = functools.reduce(transformed, transforms, self.rule)
            whole = decayed(whole, decay) if decay else whole
            whole = _with_defaults(whole, unset).standalone().renamed(self.owner, self.rule.summary)
            self._composed[key] = whole, whole.all_hyper
        return self._composed[key]


def _fits(value: Any, wanted: Any) -> bool:
    """Whether a keyword has the value that an entry is for."""
    if wanted == "given":
        return value is not None
    return bool(value) if wanted == "nonzero" else bool(value == wanted)


def list_places(rule: Rule) -> dict[str, Place]:
    """The indices of the entries of lists: the list is the keyword."""
    lists = lists_of(rule)
    return {name: (key, index) for key, length in lists.items() for index, name in enumerate(entries(key, length))}


def _with_defaults(rule: Rule, unset: frozenset[str]) -> Rule:
    """The rule with the defaults of some hyper-parameters written in their places."""
    defaults = {name: d for name in unset if isinstance(d := rule.hyper[name].default, Node)}
    if not defaults:
        return rule
    hyper = {name: hyper for name, hyper in rule.hyper.items() if name not in defaults}
    return replace(substitute_hyper(rule, defaults), hyper=hyper)


def shared_states(rules: Sequence[Rule]) -> dict[str, str]:
    """The states with one number for a group or for the model: name -> `group` or `model`."""
    return {name: s.per for rule in rules for name, s in rule.state.items() if s.per in ("group", "model")}


def reaches_groups(rules: Sequence[Rule]) -> bool:
    """Whether a rule among these has a value of a whole group, or a state of one."""
    reduces = any(n.op.kind is Kind.REDUCE and n.arg == "group" for rule in rules for n in walk(rule.expressions))
    return reduces or "group" in shared_states(rules).values()


def draws(rules: Sequence[Rule]) -> bool:
    """Whether a rule among these draws random numbers."""
    return any(rule_data.draws(rule) for rule in rules)


def reads_tags(rules: Sequence[Rule]) -> bool:
    """Whether a rule among these asks for a tensor's tags."""
    return any(map(rule_data.reads_tags, rules))


def sees_shapes(rules: Sequence[Rule]) -> bool:
    """Whether a rule among these treats a tensor by its dimensions, rows or columns."""
    return any(rule_data.sees_shape(rule) for rule in rules)


def sees_sections(rule: Rule) -> bool:
    """Whether a rule treats a tensor otherwise than the tensors that it may be joined of."""
    if rule_data.sees_shape(rule):
        return True
    parts = [*walk(rule.expressions)]
    sizes = any(n.op in (Op.NAME, Op.FACT) and n.arg == "numel" for n in parts)
    return sizes or any(n.op.kind is Kind.REDUCE and n.arg not in ("group", "model") for n in parts)
