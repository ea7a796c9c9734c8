"""The first stages of a step on the host, which run while other gradients are still to come.

A rule whose tensors need values of each other, such as the norm of all gradients, has stages before the first such
value. They run for a transfer group once all its gradients are on the host. After the last gradient, `run` goes on.

The whole step of a group waits for its end where

- the stages before the first such value write something,
- a tensor of the group has no state yet, as in the first step, or moves in pieces,
- it is not known whether a gradient of the group is complete, or still comes,
- the step measures statistics, or branches of the rule have several programs.

Early work is dropped, and done again at the end of the step, where a gradient of the group was added to afterwards,
came unexpectedly, or somebody else wrote a weight. The same holds where tensors joined or moved, and after an error:
the end of the step meets it again, and there all ranks hear of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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

    `calls` are their bound kernels, `extensions` and `versions` the counts of the engine and of the parameters.
    """

    gradients: dict[int, Tensor]
    launches: list[Launch]
    calls: list[Any]
    extensions: int
    versions: list[int]


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

    def make(self, group: TransferGroup, gradients: Mapping[int, Tensor]) -> list[Launch]:
        """The launches of a group that may begin; empty where they may not, or have begun.

        `gradients` are all of the group, by index of the routes.
        """
        if group.number in self._groups or not group.whole:
            return []
        engine, ids = self._of(gradients)
        if engine.statistics.due or not all(_is_settled(engine, i) for i in ids):
            return []
        (launches,) = engine.ready_each([(ids, [*gradients.values()])], engine.table)
        launches = launches if all(map(may_begin, launches)) else []
        calls, versions = [launch.version.call for launch in launches], self._versions(gradients)
        self._groups[group.number] = _EarlyGroup({**gradients}, launches, calls, engine.extensions, versions)
        return launches

    def take(
        self, chosen: Sequence[tuple[TransferGroup, list[int]]], gradients: Mapping[int, Tensor]
    ) -> dict[int, list[Launch]]:
        """The launches of groups that have begun, by the number of the group, for a step with these gradients."""
        if not self._groups:
            return {}
        joining = any(self._bucket(place) is None for _, places in chosen for place in places)
        begun = {
            group.number: early.launches
            for group, places in chosen
            if (early := self._groups.get(group.number)) is not None
            and not joining
            and self._holds(early, {place: gradients[place] for place in places})
        }
        self.forget({*self._groups} - {*begun})
        return {number: launches for number, launches in begun.items() if launches}

    def _holds(self, early: _EarlyGroup, gradients: Mapping[int, Tensor]) -> bool:
        """Whether everything is as it was for the early stages of a group."""
        before, (engine, _) = early.gradients, self._of(gradients)
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


def _is_settled(engine: TorchEngine, tensor_id: int) -> bool:
    """Whether a tensor has states, and its rule one program where tensors need values of each other."""
    bucket = engine.tensors[tensor_id].bucket
    return bucket is not None and not any(b.program.predicates and b.program.joins for b in engine.buckets.values())


def _same_memory(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same elements in memory."""
    return one is other or (
        one.untyped_storage()._cdata == other.untyped_storage()._cdata
        and one.storage_offset() == other.storage_offset()
        and (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
    )
