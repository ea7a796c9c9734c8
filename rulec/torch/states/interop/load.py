"""States of other libraries in eight and four bits, under torch's names: the same codes where they can be."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rulec.compiler.layout import scale_name
from rulec.errors import StateMismatch
from rulec.formats import Format, table
from rulec.torch.states.interop import flashoptim
from rulec.torch.states.interop.bitsandbytes import NUMBERED
from rulec.torch.states.interop.decoded import DecodedState
from rulec.torch.states.interop.numbered import NESTED, flattened, states_here
from rulec.torch.states.quantized import CODES
from rulec.torch.tensors.dtensor import is_placed, part_of
from rulec.torch.tensors.memory import resolved

#: The names of bitsandbytes' tensors of a parameter.
_NUMBERED = re.compile("(state|qmap|absmax|max|new_max)[12]")


def is_coded(name: str) -> bool:
    """Whether a state of this name belongs to one storage in codes, ours or another library's."""
    if name in (NESTED, flashoptim.ERROR) or _NUMBERED.fullmatch(name):
        return True
    return name.endswith((scale_name(""), CODES, flashoptim.FLASH_CODES, flashoptim.FLASH_SCALES))


def taken(
    saved: Mapping[str, Any], outside: Callable[[str], str], rule: str, wanted: Mapping[str, Format], param: Tensor,
    group: Mapping[str, Any], owner: str,
) -> tuple[dict[str, Any], dict[str, Format]]:  # fmt: skip
    """The saved states of a parameter in this group under torch's names, and by name the formats of states in codes.

    States of bitsandbytes (`state1`, `qmap1`, `absmax1`), torchao and flashoptim (`exp_avg::quantized`,
    `exp_avg::scales`) keep their codes where these are of the `wanted` format, and are floats elsewhere. `rule` is the
    rule's key, and `outside` gives torch's name of a state of it. flashoptim's `error_bits` become a master copy.
    StateMismatch, naming the `owner`, for states that are damaged.
    """
    values = flattened(saved)
    if "state1" in values:
        if rule not in NUMBERED:
            raise StateMismatch(f"{owner} has states of bitsandbytes, which has no optimizer that computes its rule")
        members = [outside(state) for number in NUMBERED[rule] for state in number]
        values = states_here(values, rule, param, members, owner)
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
