"""Reductions over several tensors: what launches, engines and processes have of a group or the model, put together."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from rulec.arrays.library import Library
from rulec.arrays.reductions import REDUCTIONS
from rulec.compiler.ir import Site
from rulec.language.node import Op

Array = np.ndarray[Any, Any]


class Across(Protocol):
    """Other processes, that have other tensors."""

    def total(self, op: Op, numbers: Any) -> Any:
        """The numbers of all processes, reduced one by one; the same in all."""
        ...


@dataclass(eq=False)
class Processes:
    """The processes that take part in reductions over the groups and the model of one engine.

    `across` are those beside this one, or None; `places` says which group of all is which here, and `group_count` how
    many there are.
    """

    across: Across | None = None
    places: Sequence[int] = ()
    group_count: int = 0


@dataclass(frozen=True)
class Join:
    """A reduction over several tensors that waits for what other launches have.

    `values` has one number for each tensor fired, or, where `per_group`, for each of their groups; `groups` are the
    groups of these, counted by `owner`.
    """

    site: Site
    op: Op
    level: str
    values: Any
    groups: Array
    library: Library
    per_group: bool = False
    owner: Processes = field(default_factory=Processes)


#: A computation that yields where it needs what other launches have, and is sent the result for each of its tensors.
Joining = Generator[Join, Array, None]


def joined(joins: Sequence[Join]) -> list[Any]:
    """The result of one reduction for each of the launches that take part: a number, or one for each of its values.

    It is reduced by the library of the first, in the order of the launches.
    """
    library, across = joins[0].library, joins[0].owner.across
    if joins[0].level == "model":
        total = _total(library, joins)
        if across is not None:
            total = across.total(joins[0].op, library.together([total]))[0]
        return [join.library.numbers(total) for join in joins]
    owners = {id(join.owner): [j for j in joins if j.owner is join.owner] for join in joins}
    by_group = {
        (owner, group): _total(library, [_of_group(join, group) for join in own])
        for owner, own in owners.items()
        for group in np.unique(np.concatenate([j.groups for j in own])).tolist()
    }
    if across is not None:
        by_group = _across_groups(library, joins, by_group)
    return [join.library.numbers(_spread_groups(library, join, by_group)) for join in joins]


def _across_groups(library: Library, joins: Sequence[Join], by_group: Mapping[tuple[int, int], Any]) -> Any:
    """The numbers of groups with what other processes have of them."""
    owners = {id(join.owner): join.owner for join in joins}
    places = {(owner, group): owners[owner].places[group] for owner, group in by_group}
    op, across = joins[0].op, joins[0].owner.across
    assert across is not None
    found = [library.constant(REDUCTIONS[op].nothing)] * joins[0].owner.group_count
    for key, place in places.items():
        found[place] = by_group[key]
    total = across.total(op, library.together(found))
    return {key: total[place] for key, place in places.items()}


def _spread_groups(library: Library, join: Join, by_group: Mapping[tuple[int, int], Any]) -> Any:
    """The number of each of a launch's values' groups."""
    groups, places = np.unique(join.groups, return_inverse=True)
    return library.take(library.together([by_group[id(join.owner), g] for g in groups.tolist()]), places)


def _of_group(join: Join, group: int) -> Join:
    mine = join.groups == group
    if mine.all():
        return join
    return replace(join, values=join.library.take(join.values, np.flatnonzero(mine)), groups=join.groups[mine])


def _total(library: Library, joins: Sequence[Join]) -> Any:
    """All values in one, launch by launch in their order; what a group has counts once, whoever brings it."""
    op = joins[0].op
    if joins[0].per_group:
        places = {(id(j.owner), g): (j, i) for j in joins for i, g in enumerate(j.groups.tolist())}
        once = [library.numbers(join.library.take(join.values, np.array([i]))) for join, i in places.values()]
        return library.reduce(op, library.together(once))
    total = library.constant(REDUCTIONS[op].nothing)
    for join in joins:
        total = library.arithmetic[REDUCTIONS[op].join](total, library.numbers(join.library.reduce(op, join.values)))
    return total
