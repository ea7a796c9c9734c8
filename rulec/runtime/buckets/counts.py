"""Step counts: the number of updates of each tensor of a bucket."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any, Self

import numpy as np

from rulec.array_api.library import Library
from rulec.runtime.arrays import Vector


class _Shown:
    """Step counts with one view for each tensor: users see and change the count through it."""

    def __init__(self, vector: Vector) -> None:
        self._vector = vector

    @property
    def vector(self) -> Vector:
        """The counts as an array, and as a view for each tensor."""
        return self._vector

    @property
    def numbers(self) -> Any:
        """The counts, live."""
        return self._vector.numbers

    @property
    def views(self) -> Sequence[Any]:
        """Each tensor's count, in the user's kind of array."""
        return self._vector.views

    def over(self, vector: Vector) -> Self:
        """Counts of the same kind over another vector."""
        counts = copy(self)
        counts._vector = vector
        return counts

    def held(self) -> Self:
        """The same counts for a part of a step that does not advance them: `advance` does nothing."""
        counts: Any = copy(self)
        counts.advance = lambda *_, **__: None
        return counts  # type: ignore[no-any-return]


class Counts(_Shown):
    """The step counts of a bucket's tensors.

    Nearly always all are equal. They are compared again only after a user changed them; a comparison of bytes finds
    that faster than any NumPy function.
    """

    def __init__(self, vector: Vector) -> None:
        super().__init__(vector)
        self._seen: bytes | None = None
        self._common: int | None = None

    def common(self, fired: np.ndarray[Any, Any] | None) -> int | None:
        """The count of all tensors, or of those at the positions `fired`; None where they differ."""
        numbers = self._vector.numbers
        if fired is not None:
            return _common(numbers[fired])
        seen = numbers.tobytes()
        if seen != self._seen:
            self._seen, self._common = seen, _common(numbers)
        return self._common

    def advance(self, fired: np.ndarray[Any, Any] | None, by: int = 1) -> None:
        """One more update, or `by` more, of every tensor, or of those at the positions `fired`."""
        numbers = self._vector.numbers
        if fired is not None:
            numbers[fired] += by
            return
        known = self._common if numbers.tobytes() == self._seen else None
        numbers += by
        if known is not None:
            self._seen, self._common = numbers.tobytes(), known + by


def is_count(value: Any) -> bool:
    """Whether this is one whole number from 0 on; text is none."""
    if isinstance(value, str | bytes):
        return False
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError):
        return False
    return number.is_integer() and number >= 0


def _common(numbers: np.ndarray[Any, Any]) -> int | None:
    return int(numbers[0]) if numbers.size and bool((numbers == numbers[0]).all()) else None


class DeviceCounts(_Shown):
    """The step counts of a bucket's tensors on a device: the host does not know them."""

    def __init__(self, vector: Vector, library: Library) -> None:
        super().__init__(vector)
        self._library = library

    def advance(self, fired: np.ndarray[Any, Any] | None, stays: Any = None) -> None:
        """One more update of every tensor, or of those at the positions `fired`, except where `stays` is true."""
        numbers, library = self.numbers, self._library
        if fired is None:
            numbers += 1 if stays is None else 1 - library.cast(stays, "float32")
            return
        old = library.take(numbers, fired)
        library.put(numbers, fired, old + (1 if stays is None else 1 - library.cast(stays, "float32")))
