"""States and weights of flashoptim: codes with scales of float16, and parts of weights beside 16 bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rulec.compiler.weights import PARTS
from rulec.errors import StateMismatch
from rulec.formats import Format, decode, table
from rulec.torch.states.interop.decoded import DecodedState
from rulec.torch.tensors.dtensor import is_placed
from rulec.torch.tensors.memory import resolved

#: Behind the names of codes and of their scales, and the name of the part of a weight.
FLASH_CODES, FLASH_SCALES, ERROR = "::quantized", "::scales", "error_bits"

#: The key of a group for the bytes of a weight, of a parameter and of its part.
_WIDTH = "master_bytewidth"

#: The bits of a mantissa, and the least exponent of a normal number.
_DTYPES = {torch.bfloat16: (7, -126), torch.float16: (10, -14)}


def decoded(values: Mapping[str, Any], param: Tensor, group: Mapping[str, Any], owner: str) -> dict[str, Any]:
    """The saved states of a parameter with those of flashoptim decoded, and the weight as a master copy.

    `group` has the bytes of a weight. StateMismatch, naming the `owner`, for codes without a scale for each 32, and for
    parts of weights of another shape or of an unknown size.
    """
    states = {name: value for name, value in values.items() if not name.endswith((FLASH_CODES, FLASH_SCALES))}
    for name in (name for name in values if name.endswith(FLASH_CODES)):
        state = name.removesuffix(FLASH_CODES)
        states[state] = _flash_decoded(values[name], values.get(f"{state}{FLASH_SCALES}"), f"{state} of {owner}")
    error = states.pop(ERROR, None)
    if error is not None and param.dtype in _DTYPES and not is_placed(param):
        width = group.get(_WIDTH)
        if error.shape != param.shape or width not in (3, 4):
            raise StateMismatch(
                f"{ERROR} of {owner} has shape {tuple(error.shape)} with {_WIDTH}={width}, where {tuple(param.shape)} "
                f"and 3 or 4 are known"
            )
        states[PARTS["master"].name] = weight(param.detach(), error, width)
    return states


def _flash_decoded(codes: Tensor, scales: Any, state: str) -> DecodedState:
    """A state of `softsign8`. Its scales are of roots where codes have no sign."""
    form = Format("softsign8", 32, signed=codes.dtype is torch.int8)
    if scales is None or scales.numel() != form.scales(codes.numel()):
        raise StateMismatch(f"{state} has {codes.numel()} codes of flashoptim without a scale for each 32")
    factors = scales.float().reshape(-1)
    factors = factors if form.signed else factors * factors
    arrays = [resolved(tensor.detach().cpu()).numpy() for tensor in (codes, factors)]
    floats = torch.from_numpy(decode(form, arrays[0], arrays[1], tuple(codes.shape))).to(codes.device)
    return DecodedState(codes, factors, form.block, torch.from_numpy(table(form).copy()), floats)


def weight(param: Tensor, error: Tensor, width: int) -> Tensor:
    """The float32 weight of this many bytes: the parameter, and a signed share of half of its last place.

    A part of 16 bits is saved in the parameter's dtype with the same bits; one of eight bits as its numbers.
    """
    if error.is_floating_point():
        error = error.to(torch.int8) if width == 3 else resolved(error).contiguous().view(torch.int16)
    mantissa, least = _DTYPES[param.dtype]
    p, share = param.float().cpu().numpy(), resolved(error.cpu()).numpy().astype(np.float32)
    share /= np.float32(127 if width == 3 else 32767)
    exponent = np.where(p == 0, least, np.maximum(np.frexp(p)[1] - 1, least))
    return torch.from_numpy(p + np.ldexp(share, exponent - mantissa - 1)).to(param.device)
