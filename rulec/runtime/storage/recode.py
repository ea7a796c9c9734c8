"""Saved states in the formats of the tensor that they go to: codes to floats, floats to codes, codes to other codes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from rulec.compiler.layout import scale_name
from rulec.errors import StateMismatch
from rulec.formats import Format, decode, encode, of_key

#: The part of a name behind that of a state in codes.
_SCALE = scale_name("")

Array = np.ndarray[Any, Any]


def formats_of(keys: Mapping[str, str], saved: Mapping[str, Any], tensor: str) -> dict[str, Format]:
    """The formats of one tensor's saved states in codes: those with scales. `keys` has the formats' keys by state.

    StateMismatch where the saved state has scales, and nothing says the format of their codes.
    """
    coded = [name.removesuffix(_SCALE) for name in saved if name.endswith(_SCALE)]
    for name in coded:
        if name not in keys:
            raise StateMismatch(
                f"{name} of {tensor} was saved in codes, and the saved groups do not say in which format: save it again"
            )
    return {name: of_key(keys[name]) for name in coded}


def recoded(
    saved: Mapping[str, Array], before: Mapping[str, Format], after: Mapping[str, Format], shape: tuple[int, ...],
    tensor: str,
) -> dict[str, Array]:  # fmt: skip
    """The saved states of a tensor of this shape: those in the formats `before` in the formats `after`.

    A state in neither is as it was saved. StateMismatch for codes or scales of another shape.
    """
    arrays = dict(saved)
    for name in {*before, *after} & saved.keys():
        if before.get(name) == after.get(name):
            continue
        values = _values(arrays, name, before.get(name), shape, tensor)
        if name in after and values.shape == shape:
            arrays[name], arrays[scale_name(name)] = encode(after[name], values)
        else:
            arrays[name] = values
    return arrays


def _values(arrays: dict[str, Array], name: str, form: Format | None, shape: tuple[int, ...], tensor: str) -> Array:
    """The values of a state in C order. The arrays lose its scales."""
    if form is None:
        return np.ascontiguousarray(arrays[name])
    codes, scales = np.ascontiguousarray(arrays[name]), np.ascontiguousarray(arrays.pop(scale_name(name)))
    wanted = form.codes_shape(shape), (form.scales(int(np.prod(shape, dtype=np.int64))),)
    if (codes.shape, scales.shape) != wanted:
        raise StateMismatch(
            f"{name} of {tensor} was saved as codes of shape {codes.shape} with scales of shape {scales.shape}, where "
            f"{form.text} has {wanted[0]} and {wanted[1]}"
        )
    return decode(form, codes.view(form.code_dtype), scales, shape)
