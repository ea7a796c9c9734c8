"""States of other libraries in eight and four bits, under torch's names: the same codes where they can be."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rulec.compiler.layout import scale_name
from rulec.errors import StateMismatch
from rulec.formats import Format, table
from rulec.torch.codes import CODES
from rulec.torch.memory import resolved
from rulec.torch.peers import flashoptim
from rulec.torch.peers.decoded import DecodedState
from rulec.torch.placed import is_placed, part_of

#: The key under which bitsandbytes keeps its tensors apart from those that FSDP gathers.
NESTED = "__bnb_optimizer_quant_state__"

#: Elements of a block in the versions of bitsandbytes.
_BLOCKS = (256, 2048, 64, 128, 512, 1024, 4096)


#: The names of bitsandbytes' tensors of a parameter.
_NUMBERED = re.compile("(state|qmap|absmax|max|new_max)[12]")


def is_coded(name: str) -> bool:
    """Whether a state of this name belongs to one storage in codes, ours or another library's."""
    if name in (NESTED, flashoptim.ERROR) or _NUMBERED.fullmatch(name):
        return True
    return name.endswith((scale_name(""), CODES, flashoptim.CODES, flashoptim.SCALES))


def taken(
    saved: Mapping[str, Any], names: Sequence[str], wanted: Mapping[str, Format], param: Tensor,
    group: Mapping[str, Any], owner: str,
) -> tuple[dict[str, Any], dict[str, Format]]:  # fmt: skip
    """The saved states of a parameter in this group under torch's names, and by name the formats of states in codes.

    States of bitsandbytes (`state1`, `qmap1`, `absmax1`), torchao and flashoptim (`exp_avg::quantized`,
    `exp_avg::scales`) keep their codes where these are of the `wanted` format, and are floats elsewhere. `names` are
    torch's names of the states, in the order of bitsandbytes' numbers. flashoptim's `error_bits` become a master copy.
    StateMismatch, naming the `owner`, for codes without a table or with scales of no known block.
    """
    values = {**{k: v for k, v in saved.items() if k != NESTED}, **saved.get(NESTED, {})}
    if "state1" in values:
        values = _of_bitsandbytes(values, names, tuple(param.shape), owner)
    values = {name: _of_torchao(value) for name, value in flashoptim.decoded(values, param, group, owner).items()}
    kept = {name: form for name, form in wanted.items() if _is(values.get(name), form)}
    scales = {scale_name(name): values[name].scales for name in kept}
    plain = {
        name: (value.codes if name in kept else value.values) if isinstance(value, DecodedState) else value
        for name, value in values.items()
    }
    return plain | scales, kept


def _is(coded: Any, form: Format) -> bool:
    """Whether a value is a state in codes of this format, by its table and block."""
    if not isinstance(coded, DecodedState) or coded.codes.dtype is not getattr(torch, form.code_dtype):
        return False
    if form.largest != 1 or form.block != coded.block:
        return False
    numbers = resolved(coded.table.detach().float().cpu()).numpy()
    fits = tuple(coded.codes.shape) == form.codes_shape(tuple(coded.values.shape))
    return fits and np.array_equal(numbers.view(np.uint32), table(form).view(np.uint32))


def _of_torchao(value: Any) -> Any:
    """A tensor of torchao in parts, or where it is the part of a DTensor its numbers; any other value as it is."""
    part = part_of(value)
    if is_placed(value) and hasattr(part, "codes") and hasattr(part, "scale"):
        shape, stride = value.shape, value.stride()
        numbers = part.dequantize()
        return type(value).from_local(numbers, value.device_mesh, value.placements, shape=shape, stride=stride)
    if not hasattr(value, "codes") or not hasattr(value, "scale"):
        return value
    codes, scales, values = value.codes, value.scale, value.dequantize()
    block = values.numel() // max(scales.numel(), 1)
    qmap = getattr(value, "qmap", None)
    return values if qmap is None else DecodedState(codes, scales, block, qmap, values)


def _of_bitsandbytes(
    values: Mapping[str, Any], names: Sequence[str], shape: tuple[int, ...], owner: str
) -> dict[str, Any]:
    """The step, and the numbered states by name. One number may have several states: AdEMAMix's means are stacked."""
    numbers = [number for number in (1, 2) if f"state{number}" in values]
    states = [state for number in numbers for state in _numbered(values, number, shape, owner)]
    return {**({"step": values["step"]} if "step" in values else {}), **dict(zip(names, states, strict=False))}


def _numbered(values: Mapping[str, Any], number: int, shape: tuple[int, ...], owner: str) -> Iterator[Any]:
    """The states of a number."""
    state = values[f"state{number}"]
    stacked = state.dim() == len(shape) + 1 and tuple(state.shape[1:]) == shape
    parts = state.unbind() if stacked else [state]
    if state.is_floating_point():
        yield from parts
        return
    codes, numbers, scales = (values.get(f"{word}{number}") for word in ("state", "qmap", "absmax"))
    if not isinstance(codes, Tensor) or not isinstance(numbers, Tensor) or not isinstance(scales, Tensor):
        raise StateMismatch(f"state{number} of {owner} is in codes, and its qmap{number} or absmax{number} is missing")
    for part, row in zip(parts, scales.float().reshape(-1).tensor_split(len(parts)), strict=True):
        yield _decoded(part, numbers, row, f"state{number} of {owner}")


def _decoded(codes: Tensor, numbers: Tensor, scales: Tensor, state: str) -> DecodedState:
    """The floats of codes beside them."""
    count = codes.numel()
    block = next((size for size in _BLOCKS if -(-count // size) == scales.numel()), None)
    if block is None:
        raise StateMismatch(f"{state} has {count} codes and {scales.numel()} scales: no block fits")
    spread = scales.repeat_interleave(block)[:count]
    values = (numbers.float()[codes.reshape(-1).long()] * spread).reshape(codes.shape)
    return DecodedState(codes, scales, block, numbers, values)
