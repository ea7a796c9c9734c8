"""Gradients of several backward passes by what they are of, summed until the one step that uses them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Generic, TypeVar

from rulec.runtime.turns import Turns, in_turn

_Key = TypeVar("_Key")
_Grad = TypeVar("_Grad")


class Sums(Turns, Generic[_Key, _Grad]):
    """Gradients by key. Arrays given are kept, not copied, and never written to."""

    def __init__(self) -> None:
        self._held: dict[_Key, _Grad] = {}
        self._writable: set[_Key] = set()  # those that were made here, and may be written to
        self._peak = 0

    def _add(self, key: _Key, grad: Any) -> None:
        held: Any = self._held.get(key)
        if held is None:
            self._held[key] = grad
        elif key in self._writable:
            held += grad
        else:
            self._held[key] = held + grad
            self._writable.add(key)

    def _note_peak(self) -> None:
        self._peak = max(self._peak, self.nbytes)

    @in_turn
    def pop(self, key: _Key) -> _Grad | None:
        """Takes one gradient out; None where there is none."""
        self._writable.discard(key)
        return self._held.pop(key, None)

    @property
    def nbytes(self) -> int:
        """How many bytes the gradients here have."""
        return sum(map(self._bytes, self._held.values()))

    def _bytes(self, grad: Any) -> int:
        return int(grad.nbytes)

    @property
    def peak_nbytes(self) -> int:
        """The most bytes that there were."""
        return self._peak

    def __getitem__(self, key: _Key) -> _Grad:
        return self._held[key]

    def __contains__(self, key: object) -> bool:
        return key in self._held

    def __iter__(self) -> Iterator[_Key]:
        return iter([*self._held])

    def __len__(self) -> int:
        return len(self._held)

    def __repr__(self) -> str:
        return f"GradStore({len(self)} gradients, {self.nbytes} bytes)"
