"""The statistics of an engine's steps: the programs that measure them, and their values by name and tensor."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from rulec.array_api.library import Library
from rulec.compiler.pipeline import compile
from rulec.errors import HyperError, RulecError, RuleError, TensorError
from rulec.language.expr.node import Op
from rulec.language.rule import Rule
from rulec.language.rule_data import Statistic
from rulec.language.statistics import MODEL, PREFIX, Watch, Watched, check_text, is_joint, joint_place, watched
from rulec.runtime.buckets.bucket import Tensor
from rulec.runtime.buckets.launch import LaunchStatistics, Part
from rulec.runtime.buckets.plan import Plan
from rulec.runtime.buckets.reductions import Join, joined


class Statistics:
    """The statistics that a user asks for, of tensors with any of some rules.

    If `due`, the next steps measure them. A rule that lacks the name of a statistic has no value of it. RuleError
    where all rules lack one, or an expression has a mistake.
    """

    def __init__(self, rules: Sequence[Rule], watch: Watch | None) -> None:
        self.due = False
        self._watched = by_rule(rules, watch) if watch else {}
        #: The names of all statistics, in the order in which they were asked for.
        self.names = [*dict.fromkeys(name for each in self._watched.values() for name, _ in each)]
        #: The statistics of the last measured step, by launch and portion.
        self.launches: list[list[LaunchStatistics]] = []
        self._before = self.launches
        #: The statistics that are of several tensors.
        self._joint = [*dict.fromkeys(name for each in self._watched.values() for name, s in each if is_joint(s))]

    def parts(self, parts: Sequence[Part]) -> list[Part]:
        """The parts under programs with their statistics.

        TensorError for a statistic of rows or columns of sharded tensors.
        """
        done = []
        for part in parts:
            measured = part.measuring
            if measured is None or measured.bucket is not part.bucket.measuring:
                measured = part.measured(self._watched[id(part.bucket.program.rule)])
                _check_whole(measured)
            done += [measured]
        return done

    def check_apart(self, what: str) -> None:
        """RulecError where a statistic is of several tensors, and `what`, a way to step, has one after the other."""
        if self._joint:
            raise RulecError(
                f"the statistic {self._joint[0]} is of a group or of the model, and {what} has one tensor after the "
                f"other: ask for a number of each tensor"
            )

    def begin(self, due: bool) -> None:
        """Begins a step, which measures the statistics where they are `due`; values of earlier ones are gone then."""
        self.due = due
        if due:
            self._before, self.launches = self.launches, []

    def take_back(self) -> None:
        """Ends a step that failed: the values of the last measured step are there again."""
        if self.due:
            self.launches = self._before

    def of_step(
        self, step: int, places: Sequence[str], wrap: Callable[[Any], Any], numbers_of: Callable[[Any], Any]
    ) -> StepStatistics:  # fmt: skip
        """The values of the last step that measured them, for one engine: see `StepStatistics`."""
        return StepStatistics(step, measured_together([(self, int)]), self.names, places, wrap, numbers_of)


def _check_whole(part: Part) -> None:
    """TensorError where a statistic has several numbers for each of a part's tensors, and these are sharded."""
    vectors = [b.name for b in part.bucket.program.statistics if not b.axes.number] if part.bucket.parted else []
    if vectors:
        name, tensor = vectors[0].removeprefix(PREFIX), part.tensors[0].name
        raise TensorError(
            f"the statistic {name} has a number for each row, column or matrix, and {tensor} is sharded: "
            f"ask for one number of the tensor, as in max({name})"
        )


def measured_together(parts: Sequence[tuple[Statistics, Callable[[int], int]]]) -> list[StatisticValues]:
    """The values of the last step of several engines, each with the numbers of its groups for users."""
    left = [(known, group_of) for each, group_of in parts for launch in each.launches for known in launch]
    values = _computed([known for known, _ in left])
    measured = [
        value
        for (known, group_of), by_name in zip(left, values, strict=True)
        for value in _values_of(known, by_name, group_of)
    ]
    return measured if all(known.skip_mask is None for known, _ in left) else _settled(measured)


def _computed(left: Sequence[LaunchStatistics]) -> list[dict[str, Any]]:
    """The statistics of all portions, by name; reductions over tensors are those of all together."""
    running = [known.all_values() for known in left]
    done: dict[int, dict[str, Any]] = {}
    results: dict[int, Any] = dict.fromkeys(range(len(left)))
    while results:
        joins: dict[int, Join] = {}
        for i, result in results.items():
            try:
                joins[i] = running[i].send(result)
            except StopIteration as stop:
                done[i] = stop.value
        results = dict(zip(joins, joined([*joins.values()]), strict=True)) if joins else {}
    return [done[i] for i in range(len(left))]


@dataclass(frozen=True)
class StatisticValues:
    """The values of one statistic, one for each of some places: tensors, groups or the model.

    `array` has float64 numbers on the device, of one dimension, in the order of `places`. If the statistic is a
    vector of rows, columns or matrices, `shapes` has the shape at each place, and `array` all numbers in a row.
    `shared` numbers are of groups or the model: other portions of a step may have the same.
    """

    name: str
    places: Sequence[str]
    array: Any
    library: Library
    shapes: Sequence[tuple[int, ...]] | None = None
    shared: bool = False

    @property
    def device(self) -> tuple[type, str]:
        """The kind of the array and its device: arrays with the same ones can be joined."""
        return type(self.array), str(getattr(self.array, "device", ""))


def _values_of(
    measured: LaunchStatistics, values: Mapping[str, Any], group_of: Callable[[int], int]
) -> Iterator[StatisticValues]:
    """The values of the statistics of one portion of tensors."""
    tensors, library = measured.tensors, measured.library
    names = [tensor.name for tensor in tensors]
    for name, value in values.items():
        axes = measured.version.program.buffer(PREFIX + name).axes
        if not axes.number:
            yield _vectors(name, tensors, measured, value, axes.letters)
            continue
        numbers = library.spread(library.cast(value, "float64"), (len(names),))
        if "n" in axes.letters:
            yield StatisticValues(name, names, _unless_skipped(measured, measured.skip_mask, numbers), library)
            continue
        members: dict[str, list[int]] = {}
        for i, tensor in enumerate(tensors):
            members.setdefault(joint_place(axes.letters, group_of(tensor.group)), []).append(i)
        numbers = library.take(numbers, np.array([each[0] for each in members.values()], np.int64))
        stay = None if measured.skip_mask is None else _all_of(measured, [*members.values()])
        yield StatisticValues(name, [*members], _unless_skipped(measured, stay, numbers), library, shared=True)


def _all_of(measured: LaunchStatistics, members: Sequence[Sequence[int]]) -> Any:
    """For each of some sets of tensors, whether all of them skipped the step."""
    library = measured.library
    skip_mask = library.cast(measured.skip_mask, "float64")
    least = [library.reduce(Op.MIN, library.take(skip_mask, np.array(each, np.int64))) for each in members]
    return library.arithmetic[Op.GT](library.together(least), library.constant(0.0))


def _settled(values: Iterable[StatisticValues]) -> list[StatisticValues]:
    """The values, with numbers that portions share once: the tensors of one portion may all have skipped the step."""
    done: list[StatisticValues] = []
    shared: dict[tuple[str, str, tuple[type, str]], StatisticValues] = {}
    for each in values:
        for i, place in enumerate(each.places if each.shared else ()):
            number = replace(each, places=[place], array=each.library.take(each.array, np.array([i])))
            key = each.name, place, each.device
            shared[key] = _either(shared[key], number) if key in shared else number
        if not each.shared:
            done.append(each)
    return [*done, *shared.values()]


def _either(one: StatisticValues, other: StatisticValues) -> StatisticValues:
    """The first of two values on one device, or the second where the first is NaN."""
    arithmetic, known = one.library.arithmetic, one.array
    return replace(one, array=arithmetic[Op.WHERE](arithmetic[Op.EQ](known, known), known, other.array))


def _vectors(
    name: str, tensors: Sequence[Tensor], measured: LaunchStatistics, value: Any, letters: str
) -> StatisticValues:
    """The values of a statistic for each row, column or matrix; NaN for tensors that skipped the step."""
    library, views = measured.library, [tensor.view for tensor in tensors]
    sides = [(v.rows if "i" in letters else 1, v.cols if "j" in letters else 1) for v in views]
    shapes = [view.kept_shape(*side, letters) for view, side in zip(views, sides, strict=True)]
    flat = [library.cast(value[i], "float64").reshape(-1) for i in range(len(tensors))]
    if measured.skip_mask is not None:
        flat = [_unless_skipped(measured, library.at(measured.skip_mask, i), each) for i, each in enumerate(flat)]
    return StatisticValues(name, [t.name for t in tensors], library.join(flat, 0), library, shapes)


def _unless_skipped(measured: LaunchStatistics, skip_mask: Any, numbers: Any) -> Any:
    """The numbers; NaN where `skip_mask` is true, which is None where no tensor skipped the step."""
    if skip_mask is None:
        return numbers
    library = measured.library
    return library.arithmetic[Op.WHERE](skip_mask, library.constant(float("nan")), numbers)


#: The statistics asked for as a key: names, and pairs of a name and an expression.
Words: TypeAlias = tuple[str | tuple[str, str], ...]


def check_kind(title: str, watch: Any) -> None:
    """HyperError or RuleError where `watch` is no watch."""
    words = [] if watch is None else [watch] if not isinstance(watch, Sequence | Mapping) else [*watch]
    if not all(isinstance(word, str) for word in words):
        raise HyperError(
            f"watch of {title} is a name such as 'norms', a list of names, or expressions by name, not {watch!r}"
        )
    for key, text in watch.items() if isinstance(watch, Mapping) else ():
        check_text(key, text)


def checked_words(title: str, watch: Watch | None) -> Words:
    """The statistics asked for as a key; HyperError or RuleError where `watch` is no watch."""
    check_kind(title, watch)
    return tuple(words_of(watch)) if watch else ()


def of_rule(rule: Rule, words: Words) -> Watched:
    """The statistics of a rule, for the words that it has."""
    done: dict[str, Statistic] = {}
    for word in words:
        with suppress(RuleError):
            done |= _of_word(rule, word)
    return tuple(done.items())


def _of_word(rule: Rule, word: str | tuple[str, str]) -> Watched:
    """The statistics of one word, after a compilation of the rule with them; RuleError where the rule lacks one."""
    asked = watched(rule, dict([word]) if isinstance(word, tuple) else [word])
    compile(rule, watch=asked)
    return asked


@functools.lru_cache(maxsize=256)
def waits_for_shards(rule: Rule, words: Words, across: bool, resident: bool) -> bool:
    """Whether a step of shards that measures statistics waits for other ranks, and not only who reads them.

    `across`: groups and the model have tensors in other ranks. `resident`: step counts are on the device.
    """
    program = compile(rule, watch=of_rule(rule, words))
    plan = Plan(program, defers=not (resident or (across and bool(program.joins))))
    return plan.reduces or not plan.alone


def words_of(watch: Watch | Words) -> list[Any]:
    """The statistics asked for, one by one: names, or pairs of a name and an expression."""
    return [*watch.items()] if isinstance(watch, Mapping) else [watch] if isinstance(watch, str) else [*watch]


def known_of(rules: Sequence[Rule], watch: Watch) -> Watch:
    """The part of a watch known to some of the rules, in the form of the watch."""

    def has(word: Any) -> bool:
        try:
            return bool(by_rule(rules, dict([word]) if isinstance(word, tuple) else [word]))
        except RuleError:
            return False

    known = [word for word in words_of(watch) if has(word)]
    return dict(known) if isinstance(watch, Mapping) else known


def by_rule(rules: Sequence[Rule], watch: Watch | Words) -> Mapping[int, Watched]:
    """The statistics of each rule, by its identity; what a rule lacks is left out where another has it."""
    words = words_of(watch)
    done: dict[int, dict[str, Any]] = {id(rule): {} for rule in rules}
    for word in words:
        mistakes: list[RuleError] = []
        for rule in rules:
            try:
                done[id(rule)] |= _of_word(rule, word)
            except RuleError as error:
                mistakes.append(error)
        if len(mistakes) == len(rules):
            raise mistakes[0]
    return {key: tuple(each.items()) for key, each in done.items()}


@dataclass
class WatchSchedule:
    """The steps that measure statistics: the first of every `every` steps. It counts the steps taken."""

    every: int
    steps: int = 0
    #: The number of the last step that measured, from 1; 0 before there is one.
    last: int = 0
    #: Whether the next step measures.
    due: bool = True

    @classmethod
    def of(cls, title: str, watch: Any, every: Any) -> WatchSchedule | None:
        """The schedule for keywords of an optimizer; None where it measures nothing. HyperError for another kind."""
        check_kind(title, watch)
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise HyperError(f"watch_every of {title} is a whole number of steps from 1, not {every!r}")
        return cls(every) if watch else None

    def restart(self) -> None:
        """Begins anew: the next step is the first."""
        self.steps, self.last, self.due = 0, 0, True

    def follow(self, other: WatchSchedule) -> None:
        """Measures in the steps in which another schedule does."""
        self.steps, self.due = other.steps, other.due

    def advance(self) -> None:
        """Counts a step that was taken."""
        self.steps += 1
        if self.due:
            self.last = self.steps
        self.due = self.steps % self.every == 0

    def __getstate__(self) -> dict[str, Any]:
        # A copy goes on counting, and has no statistics before it measures some.
        return {"every": self.every, "steps": self.steps, "last": 0}

    def __setstate__(self, state: Mapping[str, int]) -> None:
        self.every, self.steps, self.last = state["every"], state["steps"], state["last"]
        self.due = self.steps % self.every == 0


class StepStatistics(Mapping[str, Mapping[str, Any]]):
    """The statistics of one step: a name to a mapping of places to values, where the step has left them.

    A place is a parameter's name, `group 0`, or `model`. A value is an array without dimensions, or with those of rows,
    columns or matrices, in float64, on the device; nothing waits for it. `step` is the number of the step, from 1, and
    0 before the first. Names and places have the order of `names` and `places`. `wrap` turns an array between stages
    into one of the framework, and `numbers_of` numbers on a device into NumPy's.
    """

    def __init__(
        self, step: int, measured: Sequence[StatisticValues], names: Sequence[str], places: Sequence[str],
        wrap: Callable[[Any], Any], numbers_of: Callable[[Any], Any],
    ) -> None:  # fmt: skip
        self.step = step
        self._measured, self._wrap, self._numbers_of = measured, wrap, numbers_of
        having = {values.name for values in measured}
        self._names = [name for name in names if name in having]
        self._order = {place: i for i, place in enumerate(places)}
        self._by_name: dict[str, dict[str, Any]] = {}

    @classmethod
    def joined(cls, parts: Sequence[StepStatistics]) -> StepStatistics:
        """The statistics of several optimizers, where they measured the latest step that any of them did."""
        latest = max(part.step for part in parts)
        parts = [part for part in parts if part.step == latest]
        measured = [values for part in parts for values in part._measured]
        names = dict.fromkeys(name for part in parts for name in part)
        places = dict.fromkeys(place for part in parts for place in part._order)
        first = parts[0]
        return cls(latest, measured, [*names], [*places], first._wrap, first._numbers_of)

    def renamed(self, names: Mapping[str, str]) -> StepStatistics:
        """The same statistics with other names of places, where `names` has one."""
        measured = [replace(v, places=[names.get(place, place) for place in v.places]) for v in self._measured]
        places = [names.get(place, place) for place in self._order]
        return StepStatistics(self.step, measured, self._names, places, self._wrap, self._numbers_of)

    def __getitem__(self, name: str) -> Mapping[str, Any]:
        if name not in self._by_name:
            chosen = [values for values in self._measured if values.name == name]
            if not chosen:
                raise KeyError(name)
            self._by_name[name] = self._ordered(pair for values in chosen for pair in self._each(values))
        return self._by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def _ordered(self, pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
        """Values by place, in the order of the places; groups and the model come last."""
        last = len(self._order)
        return dict(sorted(pairs, key=lambda pair: self._order.get(pair[0], last)))

    def _each(self, values: StatisticValues) -> Iterator[tuple[str, Any]]:
        array, begin = self._wrap(values.array), 0
        for i, place in enumerate(values.places):
            if values.shapes is None:
                yield place, array[i]
                continue
            end = begin + int(np.prod(values.shapes[i], dtype=np.int64))
            yield place, array[begin:end].reshape(values.shapes[i])
            begin = end

    def numbers(self) -> dict[str, float]:
        """The statistics that are numbers, by flat names such as `update_norm/layers.0.weight`, as Python's floats.

        A number of the whole model has the name of the statistic alone. All numbers of a device come in one transfer.
        """
        by_device: dict[tuple[type, str], list[StatisticValues]] = {}
        for values in (values for values in self._measured if values.shapes is None):
            by_device.setdefault(values.device, []).append(values)
        done: dict[str, dict[str, float]] = {name: {} for name in self}
        for group in by_device.values():
            numbers = iter(self._numbers_of(group[0].library.join([values.array for values in group], 0)).tolist())
            for values in group:
                done[values.name] |= zip(values.places, numbers, strict=False)
        ordered = ((name, self._ordered(each.items())) for name, each in done.items())
        return {_flat_name(name, place): number for name, each in ordered for place, number in each.items()}

    def table(self) -> str:
        """The statistics that are numbers as a table: one row a place, one column a statistic."""
        numbers, names = self.numbers(), [*self]
        places = self._ordered((place, None) for v in self._measured if v.shapes is None for place in v.places)
        rows = [["", *names]]
        for place in places:
            cells = [numbers.get(_flat_name(name, place)) for name in names]
            rows.append([place, *("" if cell is None else f"{cell:.4g}" for cell in cells)])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [[row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in rows]
        return "\n".join("  ".join(line).rstrip() for line in lines)

    def __repr__(self) -> str:
        return f"<statistics of step {self.step}: {', '.join(self)}>" if self.step else "<no statistics yet>"


def _flat_name(name: str, place: str) -> str:
    return name if place == MODEL else f"{name}/{place}"
