"""Groups of leaves, each with one rule and its hyper-parameters, and the choice of a leaf's group."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax

from rulec.errors import HyperError
from rulec.functional.axes import AxisRoles
from rulec.functional.hyper import peak_of, resolved
from rulec.functional.values import Leaf
from rulec.jax.leaves import Untrained
from rulec.jax.library import LIBRARY, is_traced
from rulec.jax.oriented import Axes, axis_roles
from rulec.language.compose.combine import rename_all
from rulec.language.hyper import AT_START, Hyper, followers
from rulec.language.library.load import load
from rulec.language.partition import Partition, places_of
from rulec.language.rule import Rule
from rulec.language.rule_data import AnyRule, State
from rulec.language.sizes import lists_of, sized
from rulec.language.source import did_you_mean

#: A hyper-parameter as users give it: a number, a 0-d array, or a function of the number of steps before this one.
Given = Any

#: A rule as users give it, or several.
Rules = Rule | Partition | str | Path


@dataclass(frozen=True, eq=False)
class Group:
    """The leaves of one rule, and its hyper-parameters; `tags` are the words of all these leaves."""

    rule: Rule
    hyper: Mapping[str, Given]
    tags: tuple[str, ...] = ()

    @property
    def settings(self) -> Mapping[str, Hyper]:
        """The hyper-parameters of the rule and of the rules to which it routes leaves."""
        return _settings(self.rule)

    def static(self) -> dict[str, float]:
        """The static hyper-parameters: other values compile anew. HyperError where one is traced or a function."""
        numbers = {}
        for name, setting in self.settings.items():
            if setting.static:
                numbers[name] = _python_number(name, self.hyper.get(name, setting.default), setting, self.rule.name)
        return numbers

    def check(self) -> None:
        """HyperError for a name that the rule does not have, and for a number outside its range."""
        settings = self.settings
        for name, value in self.hyper.items():
            if name not in settings:
                raise HyperError(f"{self.rule.name} has no hyper-parameter {name!r}{did_you_mean(name, settings)}")
            # An array is not read: a step would wait for its device.
            if not callable(value) and not isinstance(value, jax.Array):
                settings[name].check(name, value, self.rule.name)

    def numbers(self) -> dict[str, Given]:
        """The hyper-parameters that are passed to a traced step: the users' without functions."""
        return {name: value for name, value in self.hyper.items() if not callable(value)}

    def resolved(self, numbers: Mapping[str, Any], machine_eps: float) -> dict[str, Any]:
        """Every hyper-parameter's value: from `numbers`, traced or not, or its default."""
        return resolved(self.rule.name, self.settings, self.hyper, numbers, machine_eps, LIBRARY)


@functools.lru_cache(maxsize=1024)
def _settings(rule: Rule) -> Mapping[str, Hyper]:
    return rule.settings


def _python_number(name: str, value: Any, setting: Hyper, owner: str) -> float:
    if is_traced(value) or callable(value):
        raise HyperError(
            f"{name} of {owner} decides what is compiled, so it must be a Python number, and is "
            f"{'a function' if callable(value) else 'traced here'}: close over it, or name it among the static_args of "
            f"optax.inject_hyperparams"
        )
    return setting.check(name, value, owner)


@dataclass(frozen=True, eq=False)
class Recipe:
    """Groups of leaves; `choose` gives the group of a leaf by its path and shape, and `tags` its words by path.

    A leaf without a group is not updated; `untrained` gives the paths of such leaves among those of all. `check` is
    called with the paths of all leaves, and refuses unused patterns. `tags` is None where users said nothing of them.
    `axes` are the roles of the axes of leaves.
    """

    groups: Sequence[Group]
    choose: Callable[[str, tuple[int, ...]], int | None]
    tags: Mapping[str, Collection[str]] | None = field(default_factory=dict)
    check: Callable[[Sequence[str]], object] = len
    untrained: Untrained = lambda names: ()
    axes: AxisRoles = field(default_factory=AxisRoles)

    def places(self, leaves: Sequence[Leaf]) -> list[int | None]:
        """The group of each leaf."""
        self.check(list(dict.fromkeys(leaf.parameter for leaf in leaves)))
        return [self.choose(leaf.parameter, leaf.shape) for leaf in leaves]

    @property
    def title(self) -> str:
        """The rules' names."""
        return ", ".join(dict.fromkeys(group.rule.name for group in self.groups))

    @property
    def key(self) -> Any:
        """All that compilation depends on: recipes of equal keys share compiled functions."""
        rules = tuple((g.rule, tuple(sorted(g.static().items())), _functions(g), g.tags) for g in self.groups)
        words = None if self.tags is None else sorted((name, tuple(sorted(tags))) for name, tags in self.tags.items())
        return rules, self.choose, None if words is None else tuple(words), self.axes


def _functions(group: Group) -> tuple[Any, ...]:
    """The names of the hyper-parameters that users gave, each with its value where it is a function."""
    return tuple((name, value if callable(value) else None) for name, value in sorted(group.hyper.items()))


def recipe(
    rule: Rules, hyper: Mapping[str, Given], tags: Mapping[str, Collection[str]] | None, axes: Axes = None
) -> Recipe:  # fmt: skip
    """One rule for all leaves, or the rules of a partition.

    `hyper` is for each rule with such a hyper-parameter; a part's own value takes precedence.
    """
    roles = axis_roles(axes)
    if isinstance(rule, Partition):
        return replace(_of_partition(rule, hyper, dict(tags or {})), axes=roles)
    single, hyper = sized(rules_of(rule)[0], hyper)
    group = _begun(Group(single, hyper))
    group.check()
    return Recipe([group], _all_in_one, None if tags is None else dict(tags), axes=roles)


def rules_of(rule: Rules) -> list[Rule]:
    """The rules of users, without the rules to which they route leaves."""
    if isinstance(rule, Partition):
        return [part.rule for part in rule.parts]
    return [rule if isinstance(rule, Rule) else _named(rule) if _is_lasting(rule) else load(rule)]


def _is_lasting(name: str | Path) -> bool:
    """Whether a name always means the same rule: names of the library do; a file may change."""
    return isinstance(name, str) and ".y" not in name


_named = functools.lru_cache(maxsize=1024)(load)


def _all_in_one(name: str, shape: tuple[int, ...]) -> int:
    return 0


@dataclass(frozen=True)
class _ByPath:
    """The group of the first pattern that matches a leaf's path."""

    patterns: tuple[str, ...]
    groups: tuple[int | None, ...]
    allow_unused: bool

    def __call__(self, name: str, shape: tuple[int, ...]) -> int | None:
        return self.groups[places_of(self.patterns, [name], allow_unused=True)[0]]

    def check(self, names: Sequence[str]) -> None:
        places_of(self.patterns, names, self.allow_unused)

    def untrained(self, names: Sequence[str]) -> list[str]:
        """The names of the leaves without a group."""
        if None not in self.groups:
            return []
        places = places_of(self.patterns, names, allow_unused=True)
        return [name for name, place in zip(names, places, strict=True) if self.groups[place] is None]


def _of_partition(partition: Partition, hyper: Mapping[str, Given], tags: Mapping[str, Collection[str]]) -> Recipe:
    parts = partition.parts
    groups = [_group(part.rule, part.hyper, part.tags, hyper) for part in parts]
    known = {name: None for group in groups for name in (*group.settings, *lists_of(group.rule))}
    for name in hyper:
        if name not in known:
            raise HyperError(f"no rule of the partition has a hyper-parameter {name!r}{did_you_mean(name, known)}")
    numbers = iter(range(len(parts)))
    places = tuple(None if part is None else next(numbers) for _, part in partition.entries)
    rules = apart([part.rule for part in parts])
    groups = [replace(group, rule=rule) for group, rule in zip(groups, rules, strict=True)]
    by_path = _ByPath(partition.patterns, places, partition.allow_unused)
    return Recipe(groups, by_path, tags, by_path.check, by_path.untrained)


def _group(rule: Rule, hyper_of_part: Mapping[str, Given], tags: tuple[str, ...], hyper: Mapping[str, Given]) -> Group:
    shared = {name: value for name, value in hyper.items() if name in rule.settings or name in lists_of(rule)}
    group = _begun(Group(*sized(rule, {**shared, **hyper_of_part}), tags))
    group.check()
    return group


def _begun(group: Group) -> Group:
    """The group with the learning rate at the start, where its rule asks for that and `lr` is a function.

    If a second learning rate is a function too, it is taken as it is.
    """
    rate = group.hyper.get("lr")
    if not callable(rate) or AT_START in group.hyper or AT_START not in group.settings:
        return group
    if any(callable(group.hyper.get(name)) for name in followers(group.settings)):
        return replace(group, hyper={**group.hyper, AT_START: 0.0})
    peak = _peak(rate)
    return group if peak is None else replace(group, hyper={**group.hyper, AT_START: peak})


@functools.lru_cache(maxsize=256)
def _peak(schedule: Callable[[Any], Any]) -> float | None:
    def values_at(counts: Any) -> Any:
        with jax.ensure_compile_time_eval():
            return jax.vmap(schedule)(counts)

    return peak_of(values_at)


def apart(rules: Sequence[Rule]) -> list[Rule]:
    """The rules with state names that do not clash; equal rules are one object.

    A state of leaves or of groups belongs to each leaf or group, whatever its rule, and keeps its name. A number of the
    model, and a number that another rule keeps as an array, is named after its rule from the second on: `prodigy.d`.
    """
    distinct: dict[Rule, Rule] = {}
    kinds: dict[str, str] = {}
    for rule in rules:
        if rule not in distinct:
            distinct[rule] = _renamed(rule, _clashes(rule, kinds))
            kinds.update((name, _kind(state)) for name, state in reversed([*_states(distinct[rule])]))
    return [distinct[rule] for rule in rules]


def _clashes(rule: Rule, kinds: Mapping[str, str]) -> dict[str, str]:
    """State -> new name, for the states of a rule that clash with states of earlier rules; `kinds` has theirs."""
    new_names: dict[str, str] = {}
    for name, state in _states(rule):
        if name in kinds and (kinds[name] != _kind(state) or kinds[name] == "model"):
            number, new_name = 2, f"{rule.key}.{name}"
            while new_name in kinds:
                number, new_name = number + 1, f"{rule.key}{number}.{name}"
            new_names[name] = new_name
    return new_names


def _states(rule: Rule | None) -> Iterator[tuple[str, State]]:
    """The states of a rule and of the rules to which it routes leaves."""
    while rule is not None:
        yield from rule.state.items()
        rule = rule.rest


def _kind(state: State) -> str:
    """The level of a state that is a number (`tensor`, `group`, `model`); else `array`."""
    return state.per if state.shape is None and state.per in ("tensor", "group", "model") else "array"


def _renamed(rule: AnyRule, names: Mapping[str, str]) -> AnyRule:
    """The rule with states renamed, also in the rules to which it routes leaves."""
    if not names:
        return rule
    renamed = rename_all(rule, names)
    if rule.otherwise is None or rule.otherwise.rule is None:
        return renamed
    return replace(renamed, otherwise=replace(rule.otherwise, rule=_renamed(rule.otherwise.rule, names)))
