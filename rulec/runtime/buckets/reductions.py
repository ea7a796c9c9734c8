"""Reductions over the tensors of a group or the model, across launches, engines and ranks."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Protocol

import numpy as np

from rulec.array_api.library import Library
from rulec.array_api.reductions import REDUCTIONS
from rulec.compiler.ir import Site
from rulec.language.expr.node import Op
from rulec.runtime.distributed.all_to_all import OwnerExchange, OwnerRequest
from rulec.runtime.distributed.process_group import StepCoordinator
from rulec.runtime.distributed.shards import Partials

Array = np.ndarray[Any, Any]


class Across(Protocol):
    """Cross-process reductions over ranks with other tensors."""

    def total(self, op: Op, numbers: Any) -> Any:
        """All-reduces numbers, element by element, over all ranks; every rank gets the same result."""
        ...

    def fail(self, error: Exception, tensors: Sequence[str]) -> Exception:
        """Reports an error at some tensors to the waiting ranks. Returns the error that this rank raises."""
        ...


@dataclass(eq=False)
class Processes:
    """The ranks that take part in reductions over the groups and the model of one engine.

    `across` reduces with the other ranks, or is None. `places` maps a group of this rank to its index among all
    groups; `group_count` is the number of all groups. `coordinator` coordinates ranks with shards of the same tensors.
    """

    across: Across | None = None
    places: Sequence[int] = ()
    group_count: int = 0
    coordinator: StepCoordinator | None = None

    @property
    def several(self) -> bool:
        """Whether there are other ranks."""
        return self.across is not None or self.coordinator is not None

    def total(self, op: Op, numbers: Any) -> Any:
        """Calls `across.total`; RulecError, in all ranks, where one has failed."""
        assert self.across is not None
        if self.coordinator is not None:
            self.coordinator.check()
        return self.across.total(op, numbers)

    def conclude(self) -> None:
        """Comes before anything is written. RulecError, in all ranks, where one has failed."""
        if self.coordinator is not None:
            self.coordinator.conclude()

    def end(self) -> None:
        """Comes when everything is written."""
        if self.coordinator is not None:
            self.coordinator.end()

    def raise_failure(self) -> None:
        """Raises the error of this rank in the last round, in which others waited for it."""
        if self.coordinator is not None and self.coordinator.failure.error is not None:
            raise self.coordinator.failure.error

    def fail(self, error: Exception, tensors: Sequence[str]) -> Exception:
        """Reports an error at some tensors to the waiting ranks. Returns the error that this rank raises."""
        told = error if self.coordinator is None else self.coordinator.fail(error, tensors)
        return told if self.across is None else self.across.fail(told, tensors)


@dataclass(frozen=True)
class Join:
    """A reduction over several tensors that waits for the values of other launches.

    `values` has one number for each fired tensor, or for each of their groups where `per_group`. `groups` are the
    groups of these numbers, in the counting of `owner`.
    """

    site: Site
    op: Op
    level: str
    values: Any
    groups: Array
    library: Library
    per_group: bool = False
    owner: Processes = field(default_factory=Processes)


@dataclass(frozen=True)
class LaunchShare:
    """The place of a launch in the larger launch that it is a part of, where a step is cut into several launches.

    Reductions over tensors are then those of the larger launches, bit by bit. `whole` names the larger launch, in the
    order of these; `tensors` are the numbers of the tensors, in their order there.
    """

    whole: tuple[Any, ...]
    tensors: Sequence[int]


@dataclass(frozen=True)
class Writing:
    """Yielded by a launch before its last stage, which writes: it waits until no launch can fail in a collective."""


#: A computation that yields where it needs values of other launches, and is sent the result for each of its tensors;
#: or where it needs reductions over other shards of its tensors, or work on global tensors, and gets the results.
Waits = Join | Partials | OwnerRequest | OwnerExchange | Writing
Joining = Generator[Waits, Any, None]


def joined(joins: Sequence[Join]) -> list[Any]:
    """The result of one reduction for each launch: one number, or one for each value of the launch.

    The library of the first launch reduces, in the order of the launches.
    """
    library, across = joins[0].library, joins[0].owner.across
    if joins[0].level == "model":
        total = _total(library, joins)
        if across is not None:
            total = joins[0].owner.total(joins[0].op, library.together([total]))[0]
        return [join.library.numbers(total) for join in joins]
    owners = {id(join.owner): [j for j in joins if j.owner is join.owner] for join in joins}
    by_group = {
        (owner, group): _total(library, [_of_group(join, group) for join in owned])
        for owner, owned in owners.items()
        for group in np.unique(np.concatenate([j.groups for j in owned])).tolist()
    }
    if across is not None:
        by_group = _across_groups(library, joins, by_group)
    return [join.library.numbers(_spread_groups(library, join, by_group)) for join in joins]


def joined_shares(joins: Sequence[Join], shares: Sequence[LaunchShare]) -> list[Any]:
    """The same for parts of larger launches: the result for a part is the result for its larger launch."""
    parts: dict[tuple[Any, ...], list[int]] = {}
    for place, share in enumerate(shares):
        parts.setdefault(share.whole, []).append(place)
    wholes = [parts[whole] for whole in sorted(parts)]
    merged = [_merged([joins[i] for i in places], [shares[i] for i in places]) for places in wholes]
    results: list[Any] = [None] * len(joins)
    for places, (join, taken), result in zip(wholes, merged, joined([join for join, _ in merged]), strict=True):
        for place, mine in zip(places, taken, strict=True):
            results[place] = result if join.level == "model" else join.library.take(result, mine)
    return results


def _merged(joins: Sequence[Join], shares: Sequence[LaunchShare]) -> tuple[Join, list[Array]]:
    """One reduction in place of those of the parts of a launch, and the places of each part's values in it."""
    first, library = joins[0], joins[0].library
    groups = np.concatenate([join.groups for join in joins])
    if first.per_group:
        groups, chosen = np.unique(groups, return_index=True)
        taken = [np.searchsorted(groups, join.groups) for join in joins]
    else:
        chosen = np.argsort(np.concatenate([np.asarray(share.tensors) for share in shares]))
        ends = np.cumsum([0, *(len(join.groups) for join in joins)])
        at = np.argsort(chosen)
        taken, groups = [at[i:j] for i, j in pairwise(ends.tolist())], groups[chosen]
    values = library.take(library.join([join.values for join in joins], 0), chosen)
    return replace(first, values=values, groups=groups), taken


def _across_groups(library: Library, joins: Sequence[Join], by_group: Mapping[tuple[int, int], Any]) -> Any:
    """The numbers of groups, reduced over all ranks."""
    owners = {id(join.owner): join.owner for join in joins}
    places = {(owner, group): owners[owner].places[group] for owner, group in by_group}
    op = joins[0].op
    numbers = [library.constant(REDUCTIONS[op].nothing)] * joins[0].owner.group_count
    for key, place in places.items():
        numbers[place] = by_group[key]
    total = joins[0].owner.total(op, library.together(numbers))
    return {key: total[place] for key, place in places.items()}


def _spread_groups(library: Library, join: Join, by_group: Mapping[tuple[int, int], Any]) -> Any:
    """The number of the group of each value of a launch."""
    groups, places = np.unique(join.groups, return_inverse=True)
    return library.take(library.together([by_group[id(join.owner), g] for g in groups.tolist()]), places)


def _of_group(join: Join, group: int) -> Join:
    mine = join.groups == group
    if mine.all():
        return join
    return replace(join, values=join.library.take(join.values, np.flatnonzero(mine)), groups=join.groups[mine])


def _total(library: Library, joins: Sequence[Join]) -> Any:
    """All values reduced to one, launch by launch in their order. The number of a group counts once."""
    op = joins[0].op
    if joins[0].per_group:
        places = {(id(j.owner), g): (j, i) for j in joins for i, g in enumerate(j.groups.tolist())}
        once = [library.numbers(join.library.take(join.values, np.array([i]))) for join, i in places.values()]
        return library.reduce(op, library.together(once))
    total = library.constant(REDUCTIONS[op].nothing)
    for join in joins:
        total = library.arithmetic[REDUCTIONS[op].join](total, library.numbers(join.library.reduce(op, join.values)))
    return total
