"""Device meshes of DTensors: process groups along mesh dimensions, and their reductions and all-to-alls.

Models after `fully_shard` are read here too: the names of their parameters, and whether their collectives are running.

Used by the optimizer's step; a change touches `consensus` and `rulec.runtime.distributed.process_group`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rulec.array_api.slices import Piece
from rulec.errors import HyperError
from rulec.language.expr.node import Op
from rulec.language.rule import Rule
from rulec.runtime.distributed.all_to_all import Sharding
from rulec.runtime.distributed.owners import Division
from rulec.runtime.distributed.process_group import RankGroup
from rulec.runtime.distributed.shards import GlobalTensor
from rulec.torch.distributed.consensus import Consensus, reaching
from rulec.torch.distributed.cross_process import Across
from rulec.torch.distributed.devices import device_of
from rulec.torch.tensors.dtensor import (  # fmt: skip
    flat_start,
    has_matrices,
    indices_here,
    is_dtensor,
    is_flat,
    is_split,
    local_tensor,
    place_of,
    rectangles_of,
    sees_more,
)
from rulec.torch.tensors.fake import is_fake
from rulec.torch.tensors.sections import Section
from rulec.torch.tensors.tensors import DTYPES

_OPS = {Op.SUM: "SUM", Op.MIN: "MIN", Op.MAX: "MAX"}


@dataclass(frozen=True, eq=False)
class SentMessage:
    """A collective that has begun; `message` is the vector sent, and lives until all is sent."""

    work: Any
    message: Tensor
    result: Tensor
    like: Any
    label: str = ""

    def wait(self) -> None:
        """Waits until it is over."""
        if self.work is not None:
            with reaching(self.label):
                self.work.wait()

    def received(self) -> Any:
        """The vectors of all ranks, one after the other, of the kind and dtype of `like`."""
        if not isinstance(self.like, Tensor):
            return self.result.to("cpu", torch.from_numpy(self.like[:0].copy()).dtype).numpy()
        return self.result.to(self.like.device, self.like.dtype)


@dataclass(frozen=True)
class MeshGroup:
    """The process group of this rank and the other ranks along dimensions of a device mesh.

    `name` has the names of the dimensions, `kind` is the type of the mesh's devices.
    """

    group: Any
    name: str = field(default="", compare=False)
    kind: str = "cpu"

    def reduce(self, op: Op, numbers: Any, of_host: bool = False) -> Any:
        """All-reduces a vector in float64 over the ranks: a tensor, or a NumPy array."""
        if is_fake(numbers):
            return numbers
        sent = numbers.clone() if isinstance(numbers, Tensor) else torch.from_numpy(np.array(numbers, np.float64))
        here = sent.to(self.device(of_host))
        with reaching(self.label):
            torch.distributed.all_reduce(here, getattr(torch.distributed.ReduceOp, _OPS[op]), group=self.group)
        return here.to(sent.device) if isinstance(numbers, Tensor) else here.cpu().numpy()

    def start_reduce(self, op: Op, numbers: Any, of_host: bool = False) -> SentMessage:
        """Begins to all-reduce a vector without waiting: a tensor, which the result takes the place of, or an array."""
        sent = numbers if isinstance(numbers, Tensor) else torch.from_numpy(np.array(numbers, np.float64))
        here = sent.to(self.device(of_host))
        with reaching(self.label):
            work = torch.distributed.all_reduce(
                here, getattr(torch.distributed.ReduceOp, _OPS[op]), group=self.group, async_op=True
            )
        return SentMessage(work, here, here, here[:0], self.label)

    @property
    def label(self) -> str:
        """The name with the number of ranks, as `dp x tp (8)`."""
        return f"{self.name} ({self.size})"

    @property
    def rank(self) -> int:
        """The rank of this process in the group."""
        return torch.distributed.get_rank(self.group)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return torch.distributed.get_world_size(self.group)

    def exchange(self, sent: Any, counts: Sequence[int], received: Sequence[int], dtype: str) -> SentMessage:
        """Begins an all-to-all: `counts` are the elements of `sent` for each rank, `received` those from each rank.

        Elements travel in `dtype`, and arrive in the dtype of `sent`.
        """
        if is_fake(sent):
            return SentMessage(None, sent, sent.new_zeros(sum(received)), sent)
        tensor = sent if isinstance(sent, Tensor) else torch.from_numpy(np.ascontiguousarray(sent))
        # An empty NumPy array has no stride, and torch sees no bytes in it.
        message = (tensor if len(tensor) else tensor.new_empty(0)).to(self.device(), DTYPES[dtype])
        result, size = message.new_empty(sum(received)), message.element_size()
        # The message is bytes, for not every transport knows every dtype.
        with reaching(self.label):
            work = torch.distributed.all_to_all_single(
                result.view(torch.uint8), message.view(torch.uint8), [size * n for n in received],
                [size * n for n in counts], group=self.group, async_op=True,
            )  # fmt: skip
        return SentMessage(work, message, result, sent[:0], self.label)

    def device(self, of_host: bool = False) -> torch.device:
        """The device for messages of values, or of words of the host."""
        return device_of(self.group, self.label, "cpu" if of_host else self.kind)


def whole_of(param: Any, spread: bool, section: Section | None = None) -> GlobalTensor | None:
    """The global tensor of a DTensor, of a section of it or of a flat parameter; None where this rank has all of it.

    With `spread` it has the sharding over all ranks.
    """
    if is_flat(param):
        start, length = flat_start(param), param.numel()
        return None if start is None else GlobalTensor((length,), (), Piece(start), (range(start, start + length),))
    if not is_split(param):
        return None
    mesh = param.device_mesh
    axes = [i for i, placed in enumerate(param.placements) if not placed.is_replicate() and mesh.size(i) > 1]
    cuts = tuple((param.placements[axis].dim, _group_along(mesh, (axis,))) for axis in axes)
    lies = _spread(param, section) if spread and axes else None
    shape = tuple(param.shape) if section is None else section.shape(param.shape)
    return GlobalTensor(shape, cuts, place_of(param, section) or Piece(), indices_here(param, section), lies)


def _spread(param: Any, section: Section | None) -> Sharding | None:
    """The sharding of a DTensor, or of a section of it, with replicas; None where a shard is no rectangle."""
    mesh = param.device_mesh
    every = _long_axes(mesh)
    cut = tuple(axis for axis in every if not param.placements[axis].is_replicate())
    alone = _spread_along(param, section, cut, None) if cut != every else None
    return _spread_along(param, section, every, alone)


def _spread_along(
    param: Any, section: Section | None, axes: tuple[int, ...], alone: Sharding | None
) -> Sharding | None:  # fmt: skip
    """The sharding over the ranks along these dimensions of the mesh."""
    mesh, rank_group = param.device_mesh, _group_along(param.device_mesh, axes)
    ranks = torch.distributed.get_process_group_ranks(rank_group.group)
    rectangles = rectangles_of(param, ranks, section)
    if rectangles is None:
        return None
    cut = [axis for axis, placed in enumerate(param.placements) if not placed.is_replicate()]
    places = [(mesh.mesh == rank).nonzero()[0].tolist() for rank in ranks]
    coordinates = tuple(tuple((at[axis], mesh.size(axis)) for axis in cut) for at in places)
    return Sharding(rank_group, Division(rectangles), coordinates, alone)


def _long_axes(mesh: Any) -> tuple[int, ...]:
    """The dimensions of a mesh with several ranks."""
    return tuple(axis for axis in range(mesh.ndim) if mesh.size(axis) > 1)


def _group_of_all(mesh: Any) -> MeshGroup:
    """The group of all ranks of a mesh."""
    return _group_along(mesh, _long_axes(mesh))


def _group_along(mesh: Any, axes: tuple[int, ...]) -> MeshGroup:
    """The group of this rank and the other ranks along these dimensions of a mesh."""
    one = mesh.get_group(axes[0]) if len(axes) == 1 else _joint_group(torch.distributed.group.WORLD, mesh, axes)
    return MeshGroup(one, _name(mesh, axes), mesh.device_type)


def _name(mesh: Any, axes: Sequence[int]) -> str:
    """The names of dimensions of a mesh, as `dp x tp`."""
    names = mesh.mesh_dim_names or [f"dimension {axis}" for axis in range(mesh.ndim)]
    return " x ".join(names[axis] for axis in axes)


@functools.cache
def _joint_group(world: Any, mesh: Any, axes: tuple[int, ...]) -> Any:
    """The process group of this rank and the other ranks along these dimensions of a mesh.

    It is no flattened mesh: torch 2.13 would gather DTensors by that mesh, and lose rows of uneven shards.
    """
    coordinate = mesh.get_coordinate()
    along = tuple(slice(None) if axis in axes else coordinate[axis] for axis in range(mesh.ndim))
    return torch.distributed.new_group(mesh.mesh[along].flatten().tolist(), use_local_synchronization=True)


@dataclass(frozen=True)
class ShardRanks:
    """The ranks with shards of a tensor; `first` says whether this rank has the first replica of its shard in them."""

    rank_group: MeshGroup
    first: bool


def shard_ranks_of(params: Sequence[Any]) -> dict[int, ShardRanks]:
    """The ranks with shards of each sharded DTensor, by its identity.

    All DTensors of a mesh have the same ranks there: along each dimension of the mesh that cuts a DTensor.
    """
    split = [param for param in params if is_split(param) and param.device_mesh.get_coordinate() is not None]
    along: dict[Any, set[int]] = {}
    for param in split:
        cut = {axis for axis in _long_axes(param.device_mesh) if not param.placements[axis].is_replicate()}
        along.setdefault(param.device_mesh, set()).update(cut)
    groups = {mesh: _group_along(mesh, tuple(sorted(axes))) for mesh, axes in along.items() if axes}
    alike = {_ranks(rank_group): rank_group for rank_group in reversed([*groups.values()])}
    return {
        id(param): ShardRanks(alike[_ranks(groups[param.device_mesh])], _is_first(param, along[param.device_mesh]))
        for param in split
        if any(not placed.is_replicate() for placed in param.placements) and param.device_mesh in groups
    }


def _is_first(param: Any, axes: Collection[int]) -> bool:
    """Whether this rank has the first replica of a DTensor along these dimensions of its mesh."""
    here = param.device_mesh.get_coordinate()
    return all(here[axis] == 0 for axis in axes if param.placements[axis].is_replicate())


def consensus_of(
    routed: Sequence[tuple[Any, Rule]], before: Consensus | None, across: Across | None,
    meets: Callable[[Rule], bool] = sees_more,
) -> Consensus | None:  # fmt: skip
    """The consensus for parameters with these rules: `before` with more ranks, or a new one; None where none is needed.

    `meets` says whether a step of a rule waits for all ranks with shards of a tensor.

    `across` reduces values of groups and the model over ranks with other tensors. HyperError where it has ranks with
    the same tensors.
    """
    if across is not None:
        for mesh in {param.device_mesh for param, _ in routed if is_dtensor(param)}:
            _check_apart(mesh, across)
    rank_groups = [rank_group for param, rule in routed if meets(rule) for rank_group in _consensus_groups(param, rule)]
    _check_devices(rank_groups)
    if before is None:
        return Consensus(_outermost(rank_groups)) if rank_groups else None
    before.rank_groups = _outermost([*before.rank_groups, *rank_groups])
    return before


def _outermost(rank_groups: Sequence[Any]) -> list[Any]:
    """The rank groups without subsets of others: a rank that agrees with a group agrees with its subsets."""
    ranks = {each: _ranks(each) for each in rank_groups}
    return [each for each in ranks if not any(ranks[each] < other for other in ranks.values())]


def _check_devices(rank_groups: Sequence[Any]) -> None:
    """HyperError where a rank group serves no device of this process."""
    for each in dict.fromkeys(rank_groups):
        each.device()


def first_consensus_of(params: Sequence[Any]) -> Consensus | None:
    """The consensus of ranks with shards of the same DTensors, for a comparison before the first step.

    None where no DTensor is sharded over several ranks; fake tensors do not count.
    """
    meshes = dict.fromkeys(
        param.device_mesh for param in params if is_dtensor(param) and not is_fake(local_tensor(param))
    )
    here = [mesh for mesh in meshes if mesh.get_coordinate() is not None]
    rank_groups = _outermost([_group_along(mesh, (axis,)) for mesh in here for axis in _long_axes(mesh)])
    _check_devices(rank_groups)
    return Consensus(rank_groups) if rank_groups else None


def _ranks(rank_group: Any) -> frozenset[int]:
    return frozenset(torch.distributed.get_process_group_ranks(rank_group.group))


def _check_apart(mesh: Any, across: Across) -> None:
    """HyperError where ranks of a mesh are in the group of ranks with other tensors."""
    both = {*across.ranks} & {*mesh.mesh.flatten().tolist()} - {torch.distributed.get_rank()}
    if both:
        raise HyperError(
            f"process {min(both)} of reduce_over has the same DTensors, whose values would be counted again: give a "
            f"group with one process of each stage of the pipeline, as mesh['pp'].get_group(), or leave it out"
        )


def _consensus_groups(param: Any, rule: Rule) -> list[RankGroup]:
    """The rank groups that must agree on a parameter's step: one for each dimension of its mesh.

    Together they are all ranks of the mesh. Replicas send one another their agreement alone; without it, one would step
    without the others.
    """
    whole = whole_of(param, spread=False)
    if whole is None or not whole.cuts:
        return []
    mesh = param.device_mesh
    if has_matrices(rule):
        return [_group_of_all(mesh)]
    replicated = [axis for axis in _long_axes(mesh) if param.placements[axis].is_replicate()]
    return [*(rank_group for _, rank_group in whole.cuts), *(_group_along(mesh, (axis,)) for axis in replicated)]


#: torch's register of modules that were sharded, or replicated: all ranks have the same.
_REGISTER = "torch.distributed._composable_state", "_module_state_mapping"

#: The parts of names from wrappers, perhaps in some ranks only.
_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "module"})


def split_names(params: Sequence[Tensor]) -> dict[int, str]:
    """The names of parameters in models after `fully_shard`, by identity.

    A model is a sharded module that no other sharded module contains. The names in a second model begin with its
    number.
    """
    modules = _split_modules()
    wanted, inner = {id(param) for param in params}, {id(child) for m in modules for child in _below(m)}
    names: dict[int, str] = {}
    models = 0
    for model in modules:
        if id(model) in inner:
            continue
        paths = {id(param): _plain(path) for path, param in model.named_parameters() if id(param) in wanted}
        for key, path in paths.items():
            names.setdefault(key, f"{models}/{path}" if models else path)
        models += bool(paths)
    return names


def are_at_work(backward_done: bool) -> bool:
    """Whether other ranks wait for this one in collectives of a sharded model, between two steps.

    They do from the beginning of a forward pass to the end of a backward pass. They also do where the model has run
    before, but not since the last step: `backward_done` says that a backward pass since then left gradients.
    """
    for module in _split_modules():
        state = module._get_fsdp_state() if hasattr(module, "_get_fsdp_state") else None
        context = getattr(state, "_state_ctx", None)
        if any(getattr(context, name, None) for name in ("iter_forward_root", "post_backward_final_callback_queued")):
            return True
        if getattr(state, "_is_root", None) is not None and not backward_done:
            return True
        if any(getattr(group, "is_unsharded", False) for group in getattr(state, "_fsdp_param_groups", ())):
            return True
    return False


def _split_modules() -> list[Any]:
    module, name = _REGISTER
    return [m for m in list(getattr(sys.modules.get(module), name, ())) if isinstance(m, nn.Module)]


def _below(module: nn.Module) -> Any:
    """The modules inside a module."""
    return (child for child in module.modules() if child is not module)


def _plain(path: str) -> str:
    """A name without the parts of wrappers."""
    return ".".join(word for word in path.split(".") if word not in _WRAPPERS)
