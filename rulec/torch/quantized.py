"""States of bitsandbytes and torchao in eight and four bits, as floats under torch's names."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from rulec.compiler.layout import scale_name
from rulec.errors import StateMismatch

#: The key under which bitsandbytes keeps its tensors apart from those that FSDP gathers.
_NESTED = "__bnb_optimizer_quant_state__"

#: Elements of a block in the versions of bitsandbytes.
_BLOCKS = (256, 2048, 64, 128, 512, 1024, 4096)


#: The names of bitsandbytes' tensors of a parameter.
_NUMBERED = re.compile("(state|qmap|absmax|max|new_max)[12]")


def is_coded(name: str) -> bool:
    """Whether a state of this name belongs to one storage in codes, ours or bitsandbytes'."""
    return name.endswith(scale_name("")) or name == _NESTED or bool(_NUMBERED.fullmatch(name))


def as_floats(saved: Mapping[str, Any], names: Sequence[str], owner: str) -> dict[str, Any]:
    """The saved states of a parameter; those of bitsandbytes (`state1`, `qmap1`, `absmax1`) and torchao as floats.

    `names` are torch's names of the states, in the order of bitsandbytes' numbers. StateMismatch, naming the `owner`,
    for codes without a table or with scales of no known block.
    """
    values = {**{k: v for k, v in saved.items() if k != _NESTED}, **saved.get(_NESTED, {})}
    if "state1" in values:
        values = _of_bitsandbytes(values, names, owner)
    return {name: v.dequantize() if hasattr(v, "codes") and hasattr(v, "scale") else v for name, v in values.items()}


def _of_bitsandbytes(values: Mapping[str, Any], names: Sequence[str], owner: str) -> dict[str, Any]:
    """The step, and the numbered states by name."""
    states = {name: values[f"state{i}"] for i, name in enumerate(names, 1) if f"state{i}" in values}
    for i, name in enumerate(states, 1):
        if not states[name].is_floating_point():
            states[name] = _decoded(values, i, owner)
    return {**({"step": values["step"]} if "step" in values else {}), **states}


def _decoded(values: Mapping[str, Any], number: int, owner: str) -> Tensor:
    """The floats of one numbered state in codes."""
    codes, table, scales = (values.get(f"{word}{number}") for word in ("state", "qmap", "absmax"))
    if not isinstance(codes, Tensor) or not isinstance(table, Tensor) or not isinstance(scales, Tensor):
        raise StateMismatch(f"state{number} of {owner} is in codes, and its qmap{number} or absmax{number} is missing")
    count = codes.numel()
    block = next((size for size in _BLOCKS if -(-count // size) == scales.numel()), None)
    if block is None:
        raise StateMismatch(f"state{number} of {owner} has {count} codes and {scales.numel()} scales: no block fits")
    spread = scales.float().repeat_interleave(block)[:count]
    return (table.float()[codes.reshape(-1).long()] * spread).reshape(codes.shape)
