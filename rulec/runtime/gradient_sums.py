"""Gradients of several backward passes by key, summed until the one step that uses them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

from rulec.locks import Lockable, synchronized

_Key = TypeVar("_Key")
_Grad = TypeVar("_Grad")


class Sums(Lockable, Generic[_Key, _Grad]):
    """Gradients by key, in memory of their own: who gave an array may write to it again.

    Gradients of 16 bits are summed in float32. A sum is rounded to their dtype once, as it is read.
    """

    def __init__(self) -> None:
        self._held: dict[_Key, Any] = {}
        self._shared: set[_Key] = set()  # kept as they came, so never written to
        self._dtypes: dict[_Key, Any] = {}  # of those that are summed in a wider one
        self._peak = 0

    def _add(self, key: _Key, grad: Any, dtype: Any, shared: bool = False) -> None:
        """Adds a gradient, or with a `dtype` of 16 bits a sum of such gradients; a `shared` one is not copied."""
        if grad.dtype != dtype:
            self._dtypes.setdefault(key, dtype)
        if key not in self._held:
            self._held[key] = grad if shared else self._copied(grad)
            self._shared |= {key} if shared else set()
            return
        if self._is_narrow(dtype) and key not in self._dtypes:
            self._dtypes[key] = dtype
            self._held[key] = self._widened(self._held[key])
            self._shared.discard(key)
        if key in self._shared:
            self._held[key] = self._held[key] + grad
            self._shared.discard(key)
        else:
            self._held[key] += grad

    @abstractmethod
    def _copied(self, grad: Any) -> Any:
        """A copy in the same memory order."""

    @abstractmethod
    def _is_narrow(self, dtype: Any) -> bool:
        """Whether it is a float of 16 bits."""

    @abstractmethod
    def _widened(self, grad: Any) -> Any:
        """A copy in float32."""

    @abstractmethod
    def _rounded(self, grad: Any, dtype: Any) -> Any:
        """A copy in this dtype."""

    def _dtype(self, key: _Key) -> Any:
        """The dtype of the gradients of a key."""
        return self._dtypes.get(key, getattr(self._held[key], "dtype", None))

    def _note_peak(self) -> None:
        self._peak = max(self._peak, self.nbytes)

    @synchronized
    def pop(self, key: _Key) -> _Grad | None:
        """Takes one gradient out; None where there is none."""
        grad = self[key] if key in self._held else None
        self._drop(key)
        return grad

    def _drop(self, key: _Key) -> None:
        self._held.pop(key, None)
        self._shared.discard(key)
        self._dtypes.pop(key, None)

    @property
    def nbytes(self) -> int:
        """The bytes of the held gradients."""
        return sum(map(self._bytes, self._held.values()))

    def _bytes(self, grad: Any) -> int:
        return int(grad.nbytes)

    @property
    def peak_nbytes(self) -> int:
        """The largest number of bytes held at once."""
        return self._peak

    def __getitem__(self, key: _Key) -> _Grad:
        grad: _Grad = self._held[key]
        return self._rounded(grad, self._dtypes[key]) if key in self._dtypes else grad

    def __contains__(self, key: object) -> bool:
        return key in self._held

    def __iter__(self) -> Iterator[_Key]:
        return iter([*self._held])

    def __len__(self) -> int:
        return len(self._held)

    def __repr__(self) -> str:
        return f"GradStore({len(self)} gradients, {self.nbytes} bytes)"
