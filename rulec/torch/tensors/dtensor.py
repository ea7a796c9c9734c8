"""DTensors: parameters of which this rank may have a shard only.

Kernels see the shard, and a state of its shape is sharded as its parameter. A rule that looks at single elements
gives the same as on a global tensor. Reductions over shards are completed over the ranks with the other shards.
Random numbers are those of the global tensor.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from rulec.array_api.slices import Piece, piece_of
from rulec.compiler.view import MatrixView, view_of
from rulec.errors import RulecError, StateMismatch, TensorError
from rulec.language.expr.node import Kind, Node, Op, name, walk
from rulec.language.rule import Rule
from rulec.language.rule_data import placed_level
from rulec.runtime.distributed.all_to_all import longest
from rulec.torch.tensors.fake import real_memory
from rulec.torch.tensors.sections import Section

_MODULE = "torch.distributed.tensor"

#: The facts of a tensor's shape that are other numbers for a shard of it.
_OF_SHAPE = frozenset({"numel", "rows", "cols"})


def is_dtensor(tensor: Any) -> bool:
    """Whether a tensor is a DTensor."""
    module = sys.modules.get(_MODULE)
    return module is not None and isinstance(tensor, module.DTensor)


def local_tensor(tensor: Any) -> Tensor:
    """The local tensor of a DTensor, not a copy; any other tensor as it is."""
    part: Tensor = tensor._local_tensor if is_dtensor(tensor) else tensor
    return part


def spec_of(tensor: Any) -> Any:
    """What torch holds a DTensor's mesh and placements in; None of any other tensor."""
    return tensor._spec if is_dtensor(tensor) else None


def is_split(tensor: Any) -> bool:
    """Whether this rank may have a shard only."""
    return is_dtensor(tensor) and any(not placement.is_replicate() for placement in tensor.placements)


def indices_here(param: Any, section: Section | None = None) -> tuple[Sequence[int], ...]:
    """The local indices of a sharded parameter, or of a section of it, along each dimension."""
    coordinate = param.device_mesh.get_coordinate()
    if coordinate is None:
        return tuple(range(0) for _ in range(param.dim()))
    return tuple(_all_indices(param, coordinate, section))


def place_of(param: Any, section: Section | None = None) -> Piece | None:
    """The position of a parameter's shard in the global tensor; None for other than ranges and rows with equal gaps."""
    part = (local_tensor(param) if section is None else section.of(local_tensor(param))).shape
    indices, whole = indices_here(param, section), param.shape
    if not all(part):
        return Piece()
    ranges = all(len(chosen) == n and chosen[-1] - chosen[0] == n - 1 for chosen, n in zip(indices, part, strict=True))
    shape = tuple(whole) if section is None else section.shape(whole)
    return piece_of(shape, part, [chosen[0] for chosen in indices]) if ranges else None


def section_here(param: Any, dim: int, start: int, stop: int, number: int) -> Section:
    """A section of a parameter, from the index `start` of a dimension to `stop`, with its local position."""
    if not is_dtensor(param):
        return Section(dim, start, stop, number, start, stop - start)
    coordinate = param.device_mesh.get_coordinate()
    if coordinate is None:
        return Section(dim, start, stop, number, 0, 0)
    indices = _indices(param, dim, coordinate)
    return Section(dim, start, stop, number, sum(i < start for i in indices), sum(start <= i < stop for i in indices))


def _all_indices(param: Any, coordinate: Sequence[int], section: Section | None) -> list[Sequence[int]]:
    """The indices of each dimension, of a parameter or a section of it, for the rank at a mesh coordinate."""
    indices = [_indices(param, axis, coordinate) for axis in range(param.dim())]
    if section is not None:
        first, last = section.start, section.stop
        indices[section.dim] = [i - first for i in indices[section.dim] if first <= i < last]
    return indices


def _indices(param: Any, axis: int, coordinate: Sequence[int]) -> Sequence[int]:
    """The indices of a dimension for the rank at a mesh coordinate, as torch shards it."""
    size, sizes = param.shape[axis], param.device_mesh.shape
    cuts = [(p, n, at) for p, n, at in zip(param.placements, sizes, coordinate, strict=True) if _cuts(p, axis)]
    if not cuts:
        return range(size)
    with real_memory():
        indices = torch.arange(size, device="cpu").reshape((1,) * axis + (size,))
        for placement, count, at in cuts:
            indices = placement._split_tensor(indices, count, with_padding=False)[0][at]
        chosen: list[int] = indices.flatten().tolist()
    return chosen


def _cuts(placement: Any, axis: int) -> bool:
    """Whether a placement, or torch's of FSDP within tensor parallelism, splits this dimension."""
    return getattr(placement, "dim", None) == axis


def check_dtensor(param: Any, rule: Rule, name: str) -> None:
    """TensorError for a sharded parameter whose rule needs more than shards and their reductions."""
    if not is_split(param):
        return
    if any(placement.is_partial() for placement in param.placements):
        raise TensorError(f"{name} is a DTensor of summands that were not added: redistribute it first")
    if placed_level(rule):
        _check_grouped(param, rule, name)
    if any(state.per in ("row", "col", "axis") for state in rule.state.values()):
        _check_joined(param, rule, name)


def _check_grouped(param: Any, rule: Rule, name: str) -> None:
    """TensorError for a sharded parameter with blocks, or with so many axes apart that they are segments of a batch."""
    view = view_of(rule, tuple(param.shape))
    if view.blocks or view.segments or "b" in view.letters:
        what = f"{placed_level(rule)} of {rule.name}"
        why = "blocks may lie in several parts" if view.blocks else f"{param.dim()} dimensions have more than two apart"
        raise TensorError(
            f"{name} is a DTensor cut over processes, and {what} is not computed of its parts, since {why}: keep "
            f"it whole on every process"
        )


def _of_elements(draw: Node) -> bool:
    """Whether a random draw, or an index, has a number for each element of a matrix."""
    if draw.op is Op.INDEX:
        return draw.arg is None or draw.args[0] is name(f"{draw.arg}s")
    return [(x.op, x.arg) for x in draw.args[-2:]] == [(Op.NAME, "rows"), (Op.NAME, "cols")]


def _check_joined(param: Any, rule: Rule, name: str) -> None:
    """TensorError where states of rows or columns, joined from several dimensions, would have uneven shards."""
    view, mesh = view_of(rule, tuple(param.shape)), param.device_mesh
    for axis, placement in enumerate(param.placements):
        cut = None if placement.is_replicate() else placement.dim % param.dim()
        for joined in view.axes:
            if len(joined) > 1 and cut in joined and (cut != min(joined) or param.shape[cut] % mesh.size(axis)):
                other = min({*range(param.dim())} - {*joined}, default=0)
                raise TensorError(
                    f"{name} is a DTensor cut along dimension {cut}, which {rule.name} joins with others, so that its "
                    f"states would be no even parts: cut dimension {other}"
                )


def sees_more(rule: Rule) -> bool:
    """Whether a rule has a value that several elements of a tensor, a group or the model give together."""
    parts = walk(rule.expressions)
    return any(n.op.kind in (Kind.REDUCE, Kind.MATRIX) and not (n.op is Op.INDEX and _of_elements(n)) for n in parts)


def has_matrices(rule: Rule) -> bool:
    """Whether a rule has matrices beside its parameter: results of functions, random ones, states of other shapes."""
    parts = [*walk(rule.expressions)]
    placed = [x for x in parts if x.op.kind is Kind.RANDOM or x.op is Op.INDEX]
    values = any(x.op.kind is Kind.MATRIX and x.op is not Op.INDEX for x in parts)
    values = values or not all(map(_of_elements, placed))
    return values or any(state.shape is not None for state in rule.state.values())


def rectangles_of(
    param: Any, ranks: Sequence[int], section: Section | None = None
) -> tuple[tuple[slice, ...], ...] | None:
    """The shard of a DTensor, or of a section of it, in each of these ranks of its mesh, as slices.

    None where one is no rectangle.
    """
    rectangles = []
    for rank in ranks:
        coordinate = (param.device_mesh.mesh == rank).nonzero()[0].tolist()
        indices = _all_indices(param, coordinate, section)
        if any(chosen and chosen[-1] - chosen[0] != len(chosen) - 1 for chosen in indices):
            return None
        rectangles.append(tuple(slice(chosen[0], chosen[-1] + 1) if chosen else slice(0, 0) for chosen in indices))
    return tuple(rectangles)


def is_flat(tensor: Any) -> bool:
    """Whether a tensor is a flat parameter of FullyShardedDataParallel, its local shard, or a view in it."""
    return bool(getattr(tensor, "_fsdp_flattened", False) or getattr(tensor, "_is_flat_param", False))


def flat_start(param: Any) -> int | None:
    """The position in a flat parameter where its local shard begins.

    None where torch does not say it: of the original parameters, which are views in a flat one.
    """
    infos = getattr(param, "_shard_param_infos", None)
    if infos is None or len(infos) != len(param._numels):
        return None
    sizes, padded = param._numels_with_padding, param._is_padding_mask
    ends = [*accumulate(sizes)]
    starts = [end - size for end, size, is_padding in zip(ends, sizes, padded, strict=True) if not is_padding]
    here = [(start, info) for start, info in zip(starts, infos, strict=True) if info.in_shard]
    if not here:
        return int(ends[-1])  # padding alone
    start, info = here[0]
    return int(start + info.intra_param_start_idx - info.offset_in_shard)


def check_flat(param: Any, rules: Sequence[Rule], name: str, together: bool) -> None:
    """TensorError for the shard of a flat parameter under a rule that needs a shape: such a shard has none.

    `together` says that values of groups and the model are reduced over all shards.
    """
    if not is_flat(param):
        return
    parts = [*walk([part for rule in rules for part in rule.expressions])]
    parts += walk([rule.applies_to for rule in rules if rule.applies_to is not None])
    whole = ("group", "model") if together else ()
    if any(_sees_more(n) and n.arg not in whole for n in parts):
        raise TensorError(
            f"{name} is a part of a flat parameter of FullyShardedDataParallel, and {rules[0].name} does not look at "
            f"every element by itself: {_remedy(parts)}"
        )


def _sees_more(part: Node) -> bool:
    """Whether a value depends on more of a tensor than an element of it, or on its shape."""
    if part.op in (Op.NAME, Op.FACT):
        return str(part.arg) in _OF_SHAPE | {"ndim"}
    return part.op.kind in (Kind.REDUCE, Kind.MATRIX, Kind.RANDOM)


def _remedy(parts: Sequence[Node]) -> str:
    if all(n.arg in ("group", "model") for n in parts if _sees_more(n)):
        return "give reduce_over= the process group that its parts are in, or choose an elementwise rule"
    return "choose an elementwise rule, or DistributedDataParallel"


def check_gradient(grad: Any, param: Any, name: str) -> None:
    """TensorError where a gradient has another placement than its parameter."""
    if is_dtensor(grad) is not is_dtensor(param):
        words = [f"{'a' if is_dtensor(x) else 'no'} DTensor" for x in (grad, param)]
        raise TensorError(f"the gradient of {name} is {words[0]} and its parameter {words[1]}: give both alike")
    if is_dtensor(param) and placement_of(grad) != placement_of(param):
        raise TensorError(
            f"the gradient of {name} is placed as {grad.placements}, its parameter as {param.placements}: redistribute "
            f"it before the step"
        )


def as_dtensor(
    state: Tensor, param: Any, view: MatrixView, letters: str, shape: tuple[int, ...] | None = None
) -> Tensor:  # fmt: skip
    """A state of a parameter's local shard as a DTensor, sharded as its parameter along the axes that it has.

    `view` is the view of the shard, `letters` are the axes of the state, as `i` for a number of each row. `shape` is
    the global shape of a state with one of its own: it is then cut along its longest side, if not between matrices.
    """
    if not is_dtensor(param) or not state.dim():
        return state
    if shape is not None:
        return as_part(state, shape, _strides(shape), param, _kept_of_own(param, view, shape))
    if {"i", "j"} <= {*letters}:
        same = state.shape == local_tensor(param).shape
        return as_part(state, param.shape, param.stride(), param) if same else state
    whole = view.whole or view
    shape = whole.kept_shape(whole.rows if "i" in letters else 1, whole.cols if "j" in letters else 1, letters)
    dims = len(shape)
    ends = {} if view.letters else {"i": dims - 2, "j": dims - 1}
    placements = [
        kept_placement(placement, view, letters, lambda dim: ends.get(view.axis(dim), dim))
        for placement in param.placements
    ]
    return as_part(state, shape, _strides(shape), param, placements)


def _strides(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[place + 1 :]) for place in range(len(shape))]


def as_part(
    here: Tensor, shape: Sequence[int], stride: Sequence[int], param: Any, placements: Sequence[Any] = ()
) -> Tensor:
    """A DTensor over the mesh of a parameter, from its local tensor, global shape and stride.

    It has the parameter's placements, unless `placements` has others. The local tensor stays where it is.
    """
    if not is_dtensor(param):
        return here
    kind: Any = sys.modules[_MODULE].DTensor
    size, chosen, mesh = torch.Size(shape), tuple(placements) or param.placements, param.device_mesh
    # Of a tensor on another device than the mesh's, `from_local` makes a copy there.
    apart = here.device.type not in (mesh.device_type, "meta")
    local = here.to("meta") if apart else here
    placed: Tensor = kind.from_local(local, mesh, chosen, run_check=False, shape=size, stride=tuple(stride))
    return kind(here, placed._spec, requires_grad=False) if apart else placed  # type: ignore[attr-defined]


def _kept_of_own(param: Any, view: MatrixView, shape: tuple[int, ...]) -> list[Any]:
    """The placements of a state with a shape of its own."""
    mesh, shard = param.device_mesh, sys.modules[_MODULE].Shard
    cuts = {axis: p.dim % param.dim() for axis, p in enumerate(param.placements) if not p.is_replicate()}
    between = {view.axis(dim) for axis, dim in cuts.items() if mesh.size(axis) > 1} == {"b"}
    return [
        p if p.is_replicate() else shard(cuts[axis] if between and view.axis(cuts[axis]) == "b" else longest(shape))
        for axis, p in enumerate(param.placements)
    ]


def kept_placement(placement: Any, view: MatrixView, letters: str, place: Callable[[int], int]) -> Any:
    """The placement of a state with these axes, from its parameter's; `place` gives the index of a dimension in it."""
    if placement.is_replicate():
        return placement
    if view.axis(placement.dim) not in letters:
        return sys.modules[_MODULE].Replicate()
    dim = place(placement.dim)
    split = getattr(placement, "split_factor", None)
    return type(placement)(dim) if split is None else type(placement)(dim, split_factor=split)


def saved_part(value: Any, param: Any, name: str) -> Tensor:
    """The local shard of a saved value, which has a parameter's placement or is global.

    StateMismatch for another placement or shape.
    """
    value = torch.as_tensor(value) if not isinstance(value, Tensor) else value
    if not is_dtensor(param):
        return local_tensor(value)
    if not is_dtensor(value):
        return _cut(value, param, name)
    if placement_of(value) != placement_of(param):
        raise StateMismatch(
            f"a saved state of {name} is placed as {value.placements}, where its parameter is as {param.placements}: "
            f"load it with torch.distributed.checkpoint"
        )
    return local_tensor(value)


def _cut(whole: Tensor, param: Any, name: str) -> Tensor:
    """The local shard of a global tensor, sharded as a parameter is."""
    here, coordinate = local_tensor(param).shape, param.device_mesh.get_coordinate()
    if tuple(whole.shape) != tuple(param.shape):
        raise StateMismatch(
            f"a saved state of {name} has shape {tuple(whole.shape)}, where its parameter has {tuple(param.shape)}"
        )
    if coordinate is None:
        return whole.new_empty(here)
    for axis in range(param.dim()):
        chosen = _indices(param, axis, coordinate)
        if len(chosen) != whole.shape[axis]:
            whole = whole.index_select(axis, torch.tensor(chosen, dtype=torch.int64, device=whole.device))
    return whole


def fill(state: Any, value: Any, name: str) -> None:
    """Writes a saved value into a state: of its placement, or global. StateMismatch for another placement."""
    part = saved_part(value, state, name)
    local_tensor(state).copy_(part if is_dtensor(state) else part.reshape(state.shape))


def check_whole(params: Sequence[Tensor], verb: str) -> None:
    """RulecError where a parameter is sharded, for work that needs all of it in one rank."""
    if any(map(is_split, params)):
        raise RulecError(f"{verb} needs whole tensors, and this process has parts: use torch.distributed.checkpoint")


def placement_of(tensor: Any) -> tuple[Any, Any]:
    """The mesh and the placements of a DTensor."""
    return tensor.device_mesh, tensor.placements
