"""Quantized states as tensors of torch, with the placement of their parameters, and the scales of saved ones.

The codes of a shard have blocks of their own: a block begins at the shard's first element. A file has a scale for each
run of elements (`Runs`). The length of runs follows from the parameter's shape and the block alone: files of every
layout have codes and scales in the same shapes, and each loads in each. A run is along one dimension, with the small
dimensions behind it joined. Its length divides a block, so a run has one scale. Runs divide the shards of their
dimension on two, four and eight ranks. Other dimensions are cut anywhere.

Shards that cut runs are saved with a scale for each element. Shards of flat parameters are saved in floats, as
FullyShardedDataParallel gathers states element by element and shards no integers.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rulec.compiler.layout import scale_name
from rulec.errors import StateMismatch
from rulec.formats import Format, decode, decode_spread, gathered, of_key
from rulec.formats.blocks import packed, unpacked
from rulec.torch.states.store import FusedState
from rulec.torch.tensors.dtensor import as_part, is_dtensor, is_flat, is_split, local_tensor, saved_part
from rulec.torch.tensors.fake import resolved
from rulec.torch.tensors.sections import Section
from rulec.torch.tensors.tensors import real_view

Array = np.ndarray[Any, Any]

#: Behind the name of a quantized state, in `optimizer.state` and `state_dict()`: codes are taken for no values.
CODES = "::codes"

_NONE: Mapping[Any, Mapping[str, Any]] = MappingProxyType({})


def coded_names(states: Mapping[str, Any], formats: Collection[str]) -> dict[str, Any]:
    """States under the names of `optimizer.state`; `formats` has the names of quantized states."""
    return {name + CODES if name in formats else name: value for name, value in states.items()}


def _placed(array: Tensor, shape: Sequence[int], param: Any) -> Tensor:
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    return as_part(array, shape, strides, param)


# States that are saved


def saved_states(states: Mapping[str, Any], keys: Mapping[str, str], param: Any) -> dict[str, Any]:
    """A parameter's states as `state_dict` gives them; `keys` are the formats of its group's states."""
    coded = {name: of_key(key) for name, key in keys.items() if name + CODES in states}
    saved = dict(states)
    for name, form in coded.items():
        codes, scales = states[name + CODES], states[scale_name(name)]
        if is_flat(param):
            del saved[name + CODES], saved[scale_name(name)]
            saved[name] = _floats(form, codes, scales, param)
        else:
            saved[name + CODES], saved[scale_name(name)] = _saved(form, codes, scales, param)
    return saved


def _floats(form: Format, codes: Tensor, scales: Tensor, param: Tensor) -> Tensor:
    """The values of a state; quantized again, they have the same codes."""
    values = decode(form, codes.cpu().numpy(), scales.cpu().numpy(), tuple(param.shape))
    return torch.from_numpy(values).to(param.device)


def _saved(form: Format, codes: Any, scales: Any, param: Any) -> Sequence[Tensor]:
    """Codes and scales of runs in the parameter's placement; of elements where its shards cut runs."""
    runs, here, codes, scales = runs_of(param, form.block), real_view(param), local_tensor(codes), local_tensor(scales)
    if runs.length == 1 or not cuts_fit(param, runs):
        whole = runs.shape
        return [_placed(x.reshape(here.shape), whole, param) for x in _each(form, codes, scales, here)]
    if runs.length < form.block:
        count = here.numel() // runs.length
        scales = scales.reshape(-1).repeat_interleave(form.block // runs.length)[:count]
    return [_of_runs(x, n, runs, param) for x, n in ((codes, 8 // form.bits), (scales, runs.length))]


def _each(form: Format, codes: Tensor, scales: Tensor, here: Tensor) -> list[Tensor]:
    """A code and a scale for each element of a local tensor, in one dimension."""
    arrays = _spread(form, form.block, (_flat(codes), _flat(scales)), here.numel())
    return [torch.from_numpy(np.array(x)).to(here.device) for x in arrays]


def _of_runs(array: Tensor, count: int, runs: Runs, param: Any) -> Tensor:
    """The global array of a parameter, from a local array with a number for each `count` elements."""
    return _placed(array.reshape(runs.counted(real_view(param).shape, count)), runs.counted(runs.shape, count), param)


def joined_codes(
    form: Format, pairs: Sequence[tuple[Tensor, Tensor]], sections: Sequence[Section], param: Any
) -> Sequence[Tensor]:
    """The codes and scales of all sections of a parameter as `state_dict` has those of the parameter.

    If sections cut runs, there is a scale for each element.
    """
    here, dim = real_view(param), sections[0].dim
    parts = [section.of(here) for section in sections]
    each = [
        [x.reshape(part.shape) for x in _each(form, local_tensor(codes), local_tensor(scales), part)]
        for (codes, scales), part in zip(pairs, parts, strict=True)
    ]
    codes, scales = (torch.cat([pair[i] for pair in each], dim) for i in (0, 1))
    runs = runs_of(param, form.block)
    run = math.prod(param.shape[dim + 1 :])
    whole = dim < runs.axis or (dim == runs.axis and all(s.stop * run % runs.length == 0 for s in sections))
    if runs.length == 1 or not (whole and cuts_fit(param, runs)):
        return [_placed(x, runs.shape, param) for x in (codes, scales)]
    bits = torch.from_numpy(np.array(packed(form, _flat(codes).view(np.uint8), codes.shape))).to(here.device)
    firsts = scales.reshape(-1)[:: runs.length]
    return [_of_runs(x, n, runs, param) for x, n in ((bits, 8 // form.bits), (firsts, runs.length))]


def all_saved(
    saved: dict[str, Any], groups: Sequence[Mapping[str, Any]], joined: Mapping[Any, Mapping[str, Any]] = _NONE
) -> dict[str, Any]:
    """A dict of torch's `state_dict` of these groups, with its states as they are saved.

    `joined` has those of parameters with sections, by the parameters' indices, as they are saved.
    """
    params = [(group.get("formats", {}), param) for group in groups for param in group["params"]]
    states = {
        place: _as_saved(value, *params[place]) if isinstance(value, Mapping) and place not in joined else value
        for place, value in {**saved["state"], **joined}.items()
    }
    return {**saved, "state": states}


def _as_saved(states: Mapping[str, Any], keys: Mapping[str, str], param: Any) -> Mapping[str, Any]:
    return states.join() if isinstance(states, FusedState) else saved_states(states, keys, param)


# States that are loaded


def with_plain_names(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Saved states with codes under the names of their states; None values are left out.

    If a user has put values of a state beside its codes, the codes and scales are left out.
    """
    edited = [name for name in saved if CODES in name and name.replace(CODES, "") in saved]
    dropped = {*edited, *(name.replace(CODES, scale_name("")) for name in edited)}
    return {
        name.replace(CODES, ""): value for name, value in saved.items() if value is not None and name not in dropped
    }


def arrays_here(
    saved: Mapping[str, Any], before: Mapping[str, Format], names: Collection[str], param: Any, owner: str
) -> tuple[dict[str, Array], dict[str, Format]]:
    """The local shard of saved states, as arrays, and the formats of the arrays of codes.

    `before` has the formats of the saved states. A state comes in floats where a local block has several scales.
    StateMismatch for codes or scales of another shape, or placed otherwise than their parameter.
    """
    arrays: dict[str, Array] = {}
    formats: dict[str, Format] = {}
    for name in names:
        if name not in before:
            arrays[name] = values_here(saved[name], param, owner)
            continue
        blocks = _blocks_here(before[name], saved[name], saved[scale_name(name)], param, f"{name} of {owner}")
        if isinstance(blocks, tuple):
            formats[name] = before[name]
            arrays[name], arrays[scale_name(name)] = blocks
        else:
            arrays[name] = blocks
    return arrays, formats


def values_here(saved: Any, param: Any, owner: str) -> Array:
    """The local shard of a saved state with a number for each element: floats in float32, integers as they are.

    One of another size than the parameter's has one dimension.
    """
    values, shape = _flat(saved_part(saved, param, owner)), tuple(real_view(param).shape)
    return values.reshape(shape) if values.size == math.prod(shape) else values


def elements_here(form: Format, codes: Any, scales: Any, param: Any, state: str) -> list[Tensor]:
    """The code and the scale of each element of a parameter's local shard, in its shape."""
    (unit, pair), here = _pair_here(form, codes, scales, param, state), real_view(param).shape
    arrays = _spread(form, unit, pair, math.prod(here))
    return [torch.from_numpy(np.array(x)).reshape(here) for x in arrays]


def _pair_here(form: Format, codes: Any, scales: Any, param: Any, state: str) -> tuple[int, Sequence[Array]]:
    """The local codes and scales of saved ones, each in one dimension, and the number of elements for each scale."""
    here, runs = tuple(real_view(param).shape), runs_of(param, form.block)
    kinds = [torch.as_tensor(x).dtype for x in (codes, scales)]
    if kinds[0] not in (torch.uint8, torch.int8) or not kinds[1].is_floating_point:
        raise StateMismatch(f"{state} was saved as codes in {kinds[0]} with scales in {kinds[1]}: save it again")
    pair = [_flat(saved_part(x, param, state) if is_dtensor(x) else x) for x in (codes, scales)]
    unit = _unit(form, pair, here, runs.length)
    if unit is None and is_split(param) and not is_dtensor(scales):
        unit = _unit(form, pair, runs.shape, runs.length)
        if unit is not None:
            each = _spread(form, unit, pair, math.prod(runs.shape))
            return 1, [_flat(saved_part(torch.from_numpy(x).reshape(runs.shape), param, state)) for x in each]
        here = runs.shape
    if unit is None:
        raise StateMismatch(
            f"{state} was saved as {pair[0].size} codes with {pair[1].size} scales, where {form.text} has "
            f"{math.prod(form.codes_shape(here))} and {form.scales(math.prod(here))} for shape {here}"
        )
    return unit, pair


def _unit(form: Format, pair: Sequence[Array], shape: tuple[int, ...], run: int) -> int | None:
    """How many elements of a tensor of this shape share a scale: a block, a run, or 1; None where nothing fits."""
    count = math.prod(shape)
    codes, scales = (x.size for x in pair)
    if codes == math.prod(form.codes_shape(shape)) and scales == form.scales(count):
        return form.block
    if codes == scales == count:
        return 1
    return run if count % run == 0 and [codes, scales] == [count * form.bits // 8, count // run] else None


def _spread(form: Format, unit: int, pair: Sequence[Array], count: int) -> list[Array]:
    """The code and the scale of each of `count` elements; `unit` of them share a scale."""
    if unit == 1:
        return [np.ascontiguousarray(pair[0]).view(form.code_dtype), pair[1]]
    bits = unpacked(form, pair[0], count)
    return [bits.view(form.code_dtype), np.repeat(pair[1], unit)[:count]]


def _blocks_here(form: Format, codes: Any, scales: Any, param: Any, state: str) -> tuple[Array, Array] | Array:
    """The codes and scales of the local blocks; the values where a block has several scales."""
    (unit, pair), here = _pair_here(form, codes, scales, param, state), tuple(real_view(param).shape)
    if unit == form.block:
        return pair[0].reshape(form.codes_shape(here)), pair[1]
    pair = _spread(form, unit, pair, math.prod(here))
    blocks = gathered(form, pair[0], pair[1])
    if blocks is None:
        return decode_spread(form, pair[0], pair[1]).reshape(here)
    return blocks[0].reshape(form.codes_shape(here)), blocks[1]


def _flat(value: Any) -> Array:
    """A local saved value in main memory, in one dimension: integers as they are, all else in float32."""
    tensor = resolved(torch.as_tensor(value).detach().cpu())
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    array: Array = (tensor.float() if tensor.is_floating_point() else tensor).reshape(-1).numpy()
    return array


#: The number of shards of a dimension that runs divide, and the least size of a dimension that is not joined with the
#: one before it: a kernel of 3 by 3 is cut by nobody.
_PARTS, _LEAST = 8, 8


@dataclass(frozen=True)
class Runs:
    """Runs of `length` elements along the dimension `axis` of a tensor with this `shape`, and those behind it."""

    shape: tuple[int, ...]
    axis: int
    length: int

    def counted(self, here: Sequence[int], count: int) -> tuple[int, ...]:
        """The shape of an array with a number for each `count` elements along the runs, of the local shape `here`."""
        if count == 1:
            return tuple(here)
        return (*here[: self.axis], math.prod(here[self.axis :]) // count)


def whole_shape(param: Any) -> tuple[int, ...]:
    """The global shape of a parameter as kernels see it."""
    return (*param.shape, 2) if param.is_complex() else tuple(param.shape)


def runs_of(param: Any, block: int) -> Runs:
    """The runs of a parameter, in blocks of this many elements. A parameter of one dimension has a run an element."""
    shape = whole_shape(param)
    axis = next((i for i in range(len(shape) - 1, 0, -1) if shape[i] >= _LEAST), min(1, len(shape) - 1))
    if param.dim() < 2:
        return Runs(shape, axis, 1)
    size = math.prod(shape[axis:])
    return Runs(shape, axis, min(block, max(1, (size & -size) // _PARTS)))


def cuts_fit(param: Any, runs: Runs) -> bool:
    """Whether every shard of a parameter has whole runs, cut as torch cuts an array with a number for each run."""
    if runs.length == 1 or not is_split(param):
        return True
    cuts = [(p.dim, n) for p, n in zip(param.placements, param.device_mesh.shape, strict=True) if not p.is_replicate()]
    if any(axis > runs.axis and n > 1 for axis, n in cuts):
        return False
    counts = [n for axis, n in cuts if axis == runs.axis and n > 1]
    size, rest = runs.shape[runs.axis], math.prod(runs.shape[runs.axis + 1 :])
    if len(counts) == 1:
        return bool(-(-size // counts[0]) * rest == runs.length * -(-(size * rest // runs.length) // counts[0]))
    parts = math.prod(counts)
    return bool(size % parts == 0 and size * rest % (parts * runs.length) == 0)
