"""A state in codes of another library, and its floats."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class DecodedState(NamedTuple):
    """A peer's state in codes: `values` are its floats, and `table` has the number of each code with the scale 1."""

    codes: Tensor
    scales: Tensor
    block: int
    table: Tensor
    values: Tensor
