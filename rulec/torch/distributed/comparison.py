"""The comparison of an optimizer's descriptions between ranks, where their digests differ.

The first rank broadcasts its description, and each rank computes the difference from its own, in one sentence. Then all
ranks raise the same error. If the order of tensors alone differs, all ranks take over the order of the first one.

Tensors are paired by name where all ranks know their names: by the names in the optimizer's groups, or else by those in
a model after `fully_shard`. Without names they are paired by order.

Used by `consensus` and `rulec.torch.step.description`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from rulec.errors import RulecError
from rulec.language.expr.node import Op

#: All-reduces numbers over all ranks, in a message of their own.
Reduce = Callable[[Op, Any], Any]


class Compared(Protocol):
    """The description of an optimizer in this rank: see `rulec.torch.step.description`."""

    @property
    def sums(self) -> tuple[float, ...]: ...
    @property
    def digest(self) -> float: ...
    @property
    def described(self) -> Said: ...
    def places(self, names: Any, other: Said) -> tuple[int, ...]: ...


class OtherOrder(Exception):
    """Raised to begin a step again, as some ranks have their tensors in another order; it is no error.

    `order` has the indices of this rank's tensors in the common order; it is empty where they are in this order.
    """

    def __init__(self, order: tuple[int, ...]) -> None:
        super().__init__("the step begins again in the order of the first process")
        self.order = order


def settle(alike: Compared, reduce: Reduce) -> None:
    """Compares descriptions with the description of the first rank.

    If one differs, all ranks raise RulecError; where only the order of one differs, all raise OtherOrder.
    """
    said, rank = alike.described, torch.distributed.get_rank()
    first = int(reduce(Op.MIN, np.array([float(rank)]))[0])
    theirs: Said = json.loads(broadcast_text(json.dumps(said) if rank == first else "", reduce))
    mine = difference(said, theirs, rank, first)
    kind = 2 if mine.text else 1 if mine.order else 0
    worst = reduce(Op.MAX, np.array([float(kind)]))[0]
    if worst == 2:
        speaker = reduce(Op.MIN, np.array([rank if mine.text else np.inf]))[0]
        raise RulecError(broadcast_text(mine.text if rank == speaker else "", reduce))
    if worst == 1:
        raise OtherOrder(alike.places(mine.order, theirs) if mine.order else ())


def broadcast_text(text: str, reduce: Reduce) -> str:
    """Broadcasts the text of the one rank that has a text, to all ranks."""
    sent = text.encode()
    length = int(reduce(Op.MAX, np.array([float(len(sent))]))[0])
    words = np.frombuffer(sent.ljust(length, b"\0"), np.uint8).astype(np.float64)
    return bytes(reduce(Op.MAX, words).astype(np.uint8)).decode()


#: A description as JSON has it. `optimizer` has the common facts of all tensors; `facts` and `hyper` have the different
#: facts and hyper-parameters of tensors. `tensors` has, for each tensor, its name, its name in a sharded model, and the
#: numbers of its facts, hyper-parameters and group; a tensor that is no DTensor has null as its facts. `ordered`: the
#: order of tensors matters. `grouped`: a rule has values of groups. `across`: groups are paired with those of ranks
#: with other tensors.
Said = Mapping[str, Any]

_REMEDY = "make the optimizers of all processes alike; nothing was changed"

_BY_ORDER = (
    "tensors without names are paired by their order: give model.named_parameters(), or build groups from lists, as "
    "the order of a set differs between processes; nothing was changed"
)

#: The names of differences in a fact of a tensor.
_WORDS = {
    "shape": "shape ", "dtype": "dtype ", "mesh": "a mesh of ", "placements": "placements ", "maximize": "maximize=",
    "rule": "the rule ",
}  # fmt: skip


@dataclass(frozen=True)
class Difference:
    """A difference in words. If the order of tensors alone differs, `order` has the names in the first rank's order.

    Both are empty where nothing differs.
    """

    text: str = ""
    order: tuple[str, ...] = ()


@dataclass(frozen=True)
class Sides:
    """The descriptions of this rank and of the first one, with their numbers."""

    said: Said
    first: Said
    rank: int
    first_rank: int

    def differ(self, words: str, here: Any, there: Any, at: str = "", remedy: str = _REMEDY) -> Difference:
        """A difference in two values, at a tensor."""
        return Difference(
            f"process {self.rank} has {words}{here}{at}, where process {self.first_rank} has {words}{there}: {remedy}"
        )


def difference(said: Said, first: Said, rank: int, first_rank: int) -> Difference:
    """The difference between a description and that of the first rank."""
    sides = Sides(said, first, rank, first_rank)
    for key, value in first["optimizer"].items():
        if said["optimizer"][key] != value:
            return sides.differ(f"{key}=", repr(said["optimizer"][key]), repr(value))
    here, there = names_of(said, first), names_of(first, said)
    if here is not None and there is not None:
        return _by_name(sides, here, there)
    return _by_order(sides) if first["ordered"] else _by_count(sides)


def names_of(said: Said, other: Said) -> list[str] | None:
    """The names to pair DTensors with those of another rank, in order; `""` for other tensors.

    None where a DTensor has no name in one of the two ranks, or two DTensors have the same.
    """
    for column in (0, 1):
        sides = [[tensor[column] if x["facts"][tensor[2]] else "" for tensor in x["tensors"]] for x in (said, other)]
        counts = [sum(x["facts"][tensor[2]] is not None for tensor in x["tensors"]) for x in (said, other)]
        known = [{name for name in side if name} for side in sides]
        if all(len(names) == count for names, count in zip(known, counts, strict=True)):
            return sides[0]
    return None


def _by_name(sides: Sides, here: Sequence[str], there: Sequence[str]) -> Difference:
    """The difference where tensors are paired by their names."""
    said, first = sides.said, sides.first
    mine = {name: tensor for name, tensor in zip(here, said["tensors"], strict=True) if name}
    theirs = {name: tensor for name, tensor in zip(there, first["tensors"], strict=True) if name}
    for name in (*theirs, *mine):
        if name not in mine:
            return Difference(f"process {sides.first_rank} has {name}, and process {sides.rank} lacks it: {_REMEDY}")
        if name not in theirs:
            return Difference(f"process {sides.rank} has {name}, and process {sides.first_rank} lacks it: {_REMEDY}")
        other = _of_tensor(sides, mine[name], theirs[name], f" for {name}")
        if other.text:
            return other
    groups = _regrouped(sides, [mine[name] for name in theirs], [*theirs.values()])
    if groups.text or not first["ordered"] or [*here] == [*there]:
        return groups
    if here.count("") != there.count(""):
        return _other_count(sides)
    return Difference(order=tuple(there))


def _by_order(sides: Sides) -> Difference:
    """The difference where tensors are paired by their order."""
    here, there = sides.said["tensors"], sides.first["tensors"]
    if len(here) != len(there):
        return _other_count(sides)
    for place, (mine, theirs) in enumerate(zip(here, there, strict=True)):
        other = _of_tensor(sides, mine, theirs, f" at place {place}", _BY_ORDER)
        if other.text:
            return other
    return _regrouped(sides, here, there)


def _by_count(sides: Sides) -> Difference:
    """The difference in the number of tensors of a kind, where their order does not matter and they have no names."""
    kinds = [
        Counter((repr(x["facts"][t[2]]), repr(x["hyper"][t[3]])) for t in x["tensors"])
        for x in (sides.said, sides.first)
    ]
    if kinds[0] == kinds[1]:
        return Difference()
    if len(sides.said["tensors"]) != len(sides.first["tensors"]):
        return _other_count(sides)
    more, less = kinds[0] - kinds[1], kinds[1] - kinds[0]
    return _of_tensor(sides, _of_kind(sides.said, more), _of_kind(sides.first, less), " for a tensor")


def _of_kind(said: Said, kinds: Mapping[Any, int]) -> Any:
    """The first tensor of one of these kinds."""
    return next(t for t in said["tensors"] if (repr(said["facts"][t[2]]), repr(said["hyper"][t[3]])) in kinds)


def _of_tensor(sides: Sides, mine: Any, theirs: Any, at: str, remedy: str = _REMEDY) -> Difference:
    """The difference in a tensor and in its rule."""
    here, there = sides.said["facts"][mine[2]], sides.first["facts"][theirs[2]]
    if here is None or there is None:
        kinds = ["no DTensor" if x is None else "a DTensor" for x in (here, there)]
        return Difference() if here is there else sides.differ("", kinds[0], kinds[1], at, remedy)
    for key, words in _WORDS.items():
        if here[key] != there[key]:
            return sides.differ(words, _tuple(here[key]), _tuple(there[key]), at, remedy)
    if here["equations"] != there["equations"]:
        return Difference(
            f"process {sides.rank} has other equations of the rule {here['rule']}{at} than process "
            f"{sides.first_rank}: {_REMEDY}"
        )
    numbers, others = sides.said["hyper"][mine[3]], sides.first["hyper"][theirs[3]]
    for name in numbers:
        if numbers[name] != others.get(name, numbers[name]):
            return sides.differ(f"{name}=", numbers[name], others[name], at)
    return Difference()


def _regrouped(sides: Sides, mine: Sequence[Any], theirs: Sequence[Any]) -> Difference:
    """The difference in the groups of tensors that are paired, where a rule has values of groups."""
    if not sides.first["grouped"]:
        return Difference()
    here, there = ([tensor[4] for tensor in side] for side in (mine, theirs))
    if not sides.first["across"]:
        here, there = ([*map([*dict.fromkeys(side)].index, side)] for side in (here, there))
    if here == there:
        return Difference()
    return Difference(
        f"process {sides.rank} has other parameter groups than process {sides.first_rank}, and the rule has values of "
        f"groups: {_REMEDY}"
    )


def _other_count(sides: Sides) -> Difference:
    return Difference(
        f"process {sides.rank} has {len(sides.said['tensors'])} tensors, where process {sides.first_rank} has "
        f"{len(sides.first['tensors'])}: {_REMEDY}"
    )


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
