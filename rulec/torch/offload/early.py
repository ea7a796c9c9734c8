"""The first stages of a step on the host, which run while other gradients are still to come.

A rule whose tensors need values of each other, such as the norm of all gradients, has stages before the first such
value. They run for a transfer group once all its gradients are on the host. After the last gradient, `run` goes on.

The whole step of a group waits for its end where

- the stages before the first such value write something,
- a tensor of the group has no state yet, as in the first step, or moves in pieces,
- it is not known whether a gradient of the group is complete, or still comes.

Few rules write something there: their programs store states after that value, and compute them again (`Bucket.begins`).

Early work is dropped, and done again at the end of the step, where a gradient of the group was added to afterwards,
came unexpectedly, or somebody else wrote a weight. The same holds where tensors joined or moved, and where a branch
takes another arm because an expected gradient is missing. After an error the end of the step meets it again, and there
all ranks hear of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from rulec.runtime.buckets.launch import Launch
from rulec.runtime.stages.step import may_begin, stop
from rulec.torch.groups.engine import TensorRef, TorchEngine
from rulec.torch.groups.routes import Route
from rulec.torch.offload.groups import TransferGroup
from rulec.torch.tensors.dtensor import local_tensor


@dataclass(frozen=True)
class _EarlyGroup:
    """The launches of a group, empty where it has none, with what they were made of.

    `calls` are their bound kernels, `extensions` and `versions` the counts of the engine and of the parameters. `alike`
    is the result of `Engine.are_alike` for all tensors with an expected gradient.
    """

    engine: TorchEngine
    gradients: dict[int, Tensor]
    launches: list[Launch]
    calls: list[Any]
    extensions: int
    versions: list[int]
    alike: bool


class EarlyStages:
    """The early stages of the tensors on some routes in one step."""

    def __init__(self, routes: Sequence[Route]) -> None:
        self._routes = routes
        self._refs: Sequence[TensorRef] = ()
        self._groups: dict[int, _EarlyGroup] = {}

    def attach(self, tensor_refs: Sequence[TensorRef]) -> None:
        """Takes the engines' tensors of the routes."""
        self.forget()
        self._refs = tensor_refs

    def make(self, group: TransferGroup, gradients: Mapping[int, Tensor], expected: Iterable[int]) -> list[Launch]:
        """The launches of a group that may begin; empty where they may not, or have begun.

        `gradients` are all of the group, by index of the routes; `expected` are the indices of all gradients of the
        step, as far as it is known.
        """
        if group.number in self._groups or not group.whole or any(self._bucket(place) is None for place in gradients):
            return []
        engine, ids = self._of(gradients)
        alike = self._are_alike(engine, expected)
        (launches,) = engine.ready_each([(ids, [*gradients.values()])], engine.table, alike=alike)
        launches = launches if all(map(may_begin, launches)) else []
        calls, versions = [launch.version.call for launch in launches], self._versions(gradients)
        early = _EarlyGroup(engine, {**gradients}, launches, calls, engine.extensions, versions, alike)
        self._groups[group.number] = early
        return launches

    def alike(self, engine: TorchEngine) -> bool | None:
        """The result of `Engine.are_alike` for the tensors of the step; None before a group of the engine begins."""
        return next((early.alike for early in self._groups.values() if early.engine is engine), None)

    def take(
        self, chosen: Sequence[tuple[TransferGroup, list[int]]], gradients: Mapping[int, Tensor]
    ) -> dict[int, list[Launch]]:
        """Returns the begun launches of a step with these gradients, by the number of their group."""
        if not self._groups:
            return {}
        places = [place for _, mine in chosen for place in mine]
        joining = any(self._bucket(place) is None for place in places)
        engines = dict.fromkeys(self._refs[place][0] for place in places)
        alike = {} if joining else {id(engine): self._are_alike(engine, places) for engine in engines}
        begun = {
            group.number: early.launches
            for group, mine in chosen
            if (early := self._groups.get(group.number)) is not None
            and early.launches
            and early.alike == alike.get(id(early.engine))
            and self._holds(early, {place: gradients[place] for place in mine})
        }
        self.forget({*self._groups} - {*begun})
        return begun

    def _are_alike(self, engine: TorchEngine, places: Iterable[int]) -> bool:
        """The result of `Engine.are_alike` for the tensors with states among these indices."""
        refs = [self._refs[place] for place in places]
        return engine.are_alike(tuple(i for of, i in refs if of is engine and engine.tensors[i].bucket is not None))

    def _holds(self, early: _EarlyGroup, gradients: Mapping[int, Tensor]) -> bool:
        """Whether everything is as it was for the early stages of a group."""
        before, engine = early.gradients, early.engine
        return (
            before.keys() == gradients.keys()
            and all(_same_memory(before[place], grad) for place, grad in gradients.items())
            and [launch.version.call for launch in early.launches] == early.calls
            and engine.extensions == early.extensions
            and self._versions(gradients) == early.versions
        )

    def forget(self, numbers: set[int] | None = None) -> None:
        """Drops the early stages of the groups with these numbers, or of all."""
        for number in [*self._groups] if numbers is None else numbers:
            for launch in self._groups.pop(number).launches:
                stop(launch)

    def _of(self, places: Mapping[int, Any]) -> tuple[TorchEngine, tuple[int, ...]]:
        """The engine of some tensors of one group, and their ids there."""
        engine = self._refs[next(iter(places))][0]
        return engine, tuple(self._refs[place][1] for place in places)

    def _bucket(self, place: int) -> Any:
        engine, i = self._refs[place]
        return engine.tensors[i].bucket

    def _versions(self, places: Mapping[int, Any]) -> list[int]:
        return [local_tensor(self._routes[place].param)._version for place in places]


def _same_memory(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same elements in memory."""
    return one is other or (
        one.untyped_storage()._cdata == other.untyped_storage()._cdata
        and one.storage_offset() == other.storage_offset()
        and (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
    )
