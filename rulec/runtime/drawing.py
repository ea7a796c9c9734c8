"""Random numbers of a rule between its stages, in the dtype of arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rulec.arrays.library import Library
from rulec.backend.noise import Noise
from rulec.language.node import Op

#: Numbers in a block of the generator.
_BLOCK = 4

#: Bytes of room for each number during the work: of a backend's kernel, in float64 and then in another dtype; and of a
#: library, with more values on the way.
_BY_KERNEL, _BY_LIBRARY = 14, 64

#: The least count of numbers in one piece.
_LEAST = 4096

_ONE = np.ones(1)
_WORD = 0xFFFFFFFF


class Draw(Noise):
    """A rule's draw as noise for a backend's `fill_noise`: one direction, with the draw's number."""

    @property
    def key(self) -> tuple[int, int]:
        """The key of the generator for a rule's streams, without the bit that marks perturbations."""
        return self.seed & _WORD, self.layer & _WORD


@dataclass(frozen=True)
class Drawing:
    """One draw of a tensor at a step.

    `room` is the bytes allowed on the way. `fill` is the backend's `fill_noise`, or None.
    """

    library: Library
    op: Op
    position: Mapping[str, Any]
    dtype: str
    room: int
    fill: Callable[[Any, Noise, int], None] | None

    def numbers(self, first: int, count: int) -> Any:
        """`count` numbers of the draw from the position `first` on, computed in float64, piece by piece."""
        draw = self._draw()
        each = _BY_LIBRARY if draw is None else _BY_KERNEL
        size = max(self.room // each, _LEAST) // _BLOCK * _BLOCK
        stop = first + count
        parts = [self._part(draw, at, min(at + size, stop)) for at in range(first, max(stop, first + 1), size)]
        return parts[0] if len(parts) == 1 else self.library.join(parts, 0)

    def _draw(self) -> Draw | None:
        """The draw for the backend's kernel; None where it has no such kernel or the host does not know the step."""
        step = self.position["step"]
        if self.fill is None or self.op is not Op.NORMAL or not isinstance(step, int | float):
            return None
        seed, tensor, number = (self.position[key] for key in ("seed", "tensor", "draw"))
        return Draw("normal", seed, tensor, int(step), _ONE, first=number)

    def _part(self, draw: Draw | None, first: int, stop: int) -> Any:
        if draw is not None and self.fill is not None:
            numbers = self.library.empty(stop - first)
            self.fill(numbers, draw, first)
            return self.library.cast(numbers, self.dtype)
        block, before = divmod(first, _BLOCK)
        numbers = self.library.random(self.op, stop - first + before, self.position, block)
        return self.library.cast(numbers[before:], self.dtype)
