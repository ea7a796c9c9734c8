"""States in codes as tensors of torch, placed as their parameters.

The codes of a part of a parameter have blocks of their own: a block begins at the part's first element. Where blocks
divide the rows of the whole parameter, the parts have the whole's blocks, and codes and scales are DTensors in a shape
that follows from the parameter's. Other parts are saved with a scale for each element. Parts of flat parameters are
saved in floats, as FullyShardedDataParallel gathers states element by element and parts no integers.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rulec.compiler.layout import scale_name
from rulec.errors import StateMismatch
from rulec.formats import Format, decode, decode_spread, gathered, of_key, spread
from rulec.torch.memory import resolved
from rulec.torch.placed import as_part, is_flat, is_placed, is_split, part_of, saved_part
from rulec.torch.sections import Section
from rulec.torch.tensors import real_view

Array = np.ndarray[Any, Any]

#: Behind the name of a state in codes, in what `state_dict()` gives: a file of codes never fills a state in floats.
CODES = "::codes"


def divides(param: Any, count: int) -> bool:
    """Whether runs of `count` elements divide the rows of a parameter, and every part of it in a process."""
    shape = whole_shape(param)
    if not _folded(shape, shape, count):
        return False
    if count == 1 or not is_split(param):
        return True
    cuts = [(p.dim, n) for p, n in zip(param.placements, param.device_mesh.shape, strict=True) if not p.is_replicate()]
    if shape[-1] % count:
        return all(axis == 0 for axis, _ in cuts)
    parts = math.prod(n for axis, n in cuts if axis == len(shape) - 1)
    return bool(shape[-1] % (count * parts) == 0)


def whole_shape(param: Any) -> tuple[int, ...]:
    """The shape of a parameter as kernels see it, with all its parts."""
    return (*param.shape, 2) if param.is_complex() else tuple(param.shape)


def _folded(shape: Sequence[int], whole: Sequence[int], count: int) -> tuple[int, ...]:
    """The shape of an array with a number for each run of `count` elements; empty where runs do not divide rows.

    `whole` is the shape of the whole parameter, and says which dimensions are counted in runs.
    """
    if whole and whole[-1] % count == 0:
        return (*shape[:-1], shape[-1] // count)
    if len(whole) > 1 and math.prod(whole[1:]) % count == 0:
        return shape[0], math.prod(shape[1:]) // count
    return ()


def _placed(array: Tensor, shape: Sequence[int], param: Any) -> Tensor:
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    return as_part(array, shape, strides, param)


# States that are saved


def saved_states(states: Mapping[str, Any], keys: Mapping[str, str], param: Any) -> dict[str, Any]:
    """A parameter's states as `state_dict` gives them; `keys` are the formats of its group's states."""
    coded = {name: of_key(key) for name, key in keys.items() if scale_name(name) in states}
    if coded and is_flat(param):
        return {
            name: _floats(coded[name], value, states[scale_name(name)], param) if name in coded else value
            for name, value in states.items()
            if name not in {scale_name(state) for state in coded}
        }
    saved = {name + CODES if name in coded else name: value for name, value in states.items()}
    for name, form in coded.items():
        saved[name + CODES], saved[scale_name(name)] = _saved(form, states[name], states[scale_name(name)], param)
    return saved


def _floats(form: Format, codes: Tensor, scales: Tensor, param: Tensor) -> Tensor:
    """The values of a state; encoded again, they have the same codes."""
    values = decode(form, codes.cpu().numpy(), scales.cpu().numpy(), tuple(param.shape))
    return torch.from_numpy(values).to(param.device)


def _saved(form: Format, codes: Any, scales: Any, param: Any) -> Sequence[Tensor]:
    """Codes and scales in the parameter's shape and placement, where it has any."""
    if scales.numel() == math.prod(whole_shape(param)):  # of sections: a scale for each element
        return codes, scales
    if divides(param, form.block):
        return [_of_runs(part_of(x), n, param) for x, n in ((codes, 8 // form.bits), (scales, form.block))]
    if not is_split(param):
        return part_of(codes), part_of(scales)
    return [_placed(x, whole_shape(param), param) for x in _each(form, codes, scales, real_view(param))]


def _each(form: Format, codes: Tensor, scales: Tensor, here: Tensor) -> list[Tensor]:
    """A code and a scale for each element of a tensor in this process, in its shape."""
    arrays = spread(form, _flat(part_of(codes)), _flat(part_of(scales)), here.numel())
    return [torch.from_numpy(np.array(x)).reshape(here.shape).to(here.device) for x in arrays]


def joined_codes(
    form: Format, pairs: Sequence[tuple[Tensor, Tensor]], sections: Sequence[Section], param: Any
) -> tuple[Tensor, Tensor]:
    """The codes and scales of all sections of a parameter as those of the parameter.

    They are as the parameter without sections has them where the blocks of sections are blocks of the parameter; else
    there is a scale for each element.
    """
    here, dim = real_view(param), sections[0].dim
    each = [_each(form, *pair, section.of(here)) for pair, section in zip(pairs, sections, strict=True)]
    codes, scales = (torch.cat([pair[i] for pair in each], dim) for i in (0, 1))
    run = math.prod(param.shape[dim + 1 :])
    whole = all((section.stop - section.start) * run % form.block == 0 for section in sections)
    whole = whole and (not is_split(param) or divides(param, form.block))
    blocks = gathered(form, _flat(codes), _flat(scales)) if whole else None
    if blocks is None:
        return _placed(codes, param.shape, param), _placed(scales, param.shape, param)
    packed, firsts = (torch.from_numpy(np.array(x)).to(here.device) for x in blocks)
    return packed.reshape(form.codes_shape(tuple(here.shape))), firsts


def _of_runs(array: Tensor, count: int, param: Any) -> Tensor:
    """An array with a number for each run of `count` elements, of a parameter whose rows runs divide."""
    whole = whole_shape(param)
    return _placed(array.view(_folded(real_view(param).shape, whole, count)), _folded(whole, whole, count), param)


def all_saved(saved: dict[str, Any], groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A dict of torch's `state_dict` of these groups, with its states as they are saved."""
    params = [(group.get("formats", {}), param) for group in groups for param in group["params"]]
    states = {
        place: saved_states(value, *params[place]) if isinstance(value, Mapping) else value
        for place, value in saved["state"].items()
    }
    return {**saved, "state": states}


# States that are loaded


def with_plain_names(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Saved states with codes under the names of their states; None values are left out."""
    return {name.replace(CODES, ""): value for name, value in saved.items() if value is not None}


def arrays_here(
    saved: Mapping[str, Any], before: Mapping[str, Format], names: Collection[str], param: Any, owner: str
) -> tuple[dict[str, Array], dict[str, Format]]:
    """This process's part of saved states, as arrays, and the formats of the arrays of codes.

    `before` has the formats of the saved states. A state comes in floats where a block here has several scales.
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
    """This process's part of a saved state with a number for each element: floats in float32, integers as they are.

    One of another size than the parameter's has one dimension.
    """
    values, shape = _flat(saved_part(saved, param, owner)), tuple(real_view(param).shape)
    return values.reshape(shape) if values.size == math.prod(shape) else values


def elements_here(form: Format, codes: Any, scales: Any, param: Any, state: str) -> list[Tensor]:
    """The code and the scale of each element of this process's part of a parameter, in its shape."""
    pair, here = _pair_here(form, codes, scales, param, state), real_view(param).shape
    arrays = spread(form, *pair, math.prod(here)) if _fits(form, pair, tuple(here)) else pair
    return [torch.from_numpy(np.array(x)).reshape(here) for x in arrays]


def _pair_here(form: Format, codes: Any, scales: Any, param: Any, state: str) -> tuple[Array, Array]:
    """This process's codes and scales of saved ones, each in one dimension: of its blocks, or of each element."""
    here, whole = tuple(real_view(param).shape), whole_shape(param)
    pair = [_flat(saved_part(x, param, state) if is_placed(x) else x) for x in (codes, scales)]
    if is_split(param) and not is_placed(scales) and not _fits(form, pair, here):
        if not _each_fit(pair, whole):
            _check_fits(form, pair, whole, state)
            pair = [*spread(form, pair[0], pair[1], math.prod(whole))]
        pair = [_flat(saved_part(torch.from_numpy(np.array(x)).reshape(whole), param, state)) for x in pair]
    elif not _each_fit(pair, here):
        _check_fits(form, pair, here, state)
    return pair[0], pair[1]


def _each_fit(pair: Sequence[Array], shape: tuple[int, ...]) -> bool:
    """Whether there are a code and a scale for each element of a tensor of this shape."""
    return [x.size for x in pair] == [math.prod(shape)] * 2


def _blocks_here(form: Format, codes: Any, scales: Any, param: Any, state: str) -> tuple[Array, Array] | Array:
    """The codes and scales of this process's blocks; the values where a block has several scales."""
    pair, here = _pair_here(form, codes, scales, param, state), tuple(real_view(param).shape)
    if _fits(form, pair, here):
        return pair[0].reshape(form.codes_shape(here)), pair[1]
    blocks = gathered(form, pair[0], pair[1])
    if blocks is None:
        return decode_spread(form, pair[0], pair[1]).reshape(here)
    return blocks[0].reshape(form.codes_shape(here)), blocks[1]


def _flat(value: Any) -> Array:
    """A saved value of this process in main memory, in one dimension: integers as they are, all else in float32."""
    tensor = resolved(torch.as_tensor(value).detach().cpu())
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    array: Array = (tensor.float() if tensor.is_floating_point() else tensor).reshape(-1).numpy()
    return array


def _fits(form: Format, pair: Sequence[Array], shape: tuple[int, ...]) -> bool:
    """Whether codes and scales are those of a tensor of this shape."""
    return [x.size for x in pair] == [math.prod(form.codes_shape(shape)), form.scales(math.prod(shape))]


def _check_fits(form: Format, pair: Sequence[Array], shape: tuple[int, ...], state: str) -> None:
    if not _fits(form, pair, shape):
        raise StateMismatch(
            f"{state} was saved as {pair[0].size} codes with {pair[1].size} scales, where {form.text} has "
            f"{math.prod(form.codes_shape(shape))} and {form.scales(math.prod(shape))} for shape {shape}"
        )
