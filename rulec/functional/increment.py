"""The increment of a parameter of 16 bits, for users who add increments, as optax does.

The weight has more digits than its parameter. Users add in float32 and round the sum to the parameter's dtype. A
difference of two numbers of 16 bits is exact in float32 where the new one is not below 2**-16 of the old one (2**-13 in
float16), and the sum is then the new parameter. Elsewhere the sum differs from it by less than an ulp of float32 of the
old parameter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rulec.functional.library import PureFunctions


@dataclass(frozen=True)
class Increment:
    """`update`, in float32, and for each element whether `parameter + update`, rounded, is not the new parameter."""

    update: Any
    missed: Any

    def part(self, name: str, new: Any, of: PureFunctions) -> Any:
        """The memory of this name beside the parameter after the update.

        A loss or low places belong to one parameter alone. Without them the weight is the parameter itself.
        """
        return new if name == "param::master" else of.xp.where(self.missed, of.xp.zeros_like(new), new)


def increment(new: Any, old: Any, of: PureFunctions) -> Increment:
    """The increment from the old parameter to the new one, both of one dtype of 16 bits."""
    xp = of.xp
    before = old.astype(xp.float32)
    update = of.kept(new).astype(xp.float32) - before
    comes = (before + update).astype(new.dtype)
    return Increment(update, comes.view(xp.uint16) != new.view(xp.uint16))
