"""One thread at a time: states, counts, scratch and tables of addresses serve one step at a time."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from threading import RLock
from typing import Any, Self, TypeVar, cast

_Method = TypeVar("_Method", bound=Callable[..., Any])


class Lockable:
    """An object for one thread at a time: methods marked `synchronized`, and blocks `with self._lock`, exclude others.

    The thread that holds the lock does not wait for itself. A copy of the object has a separate lock.
    """

    def __new__(cls, *args: Any, **keywords: Any) -> Self:
        instance = super().__new__(cls)
        instance._lock = RLock()
        return instance

    _lock: RLock

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_lock"}


def synchronized(method: _Method) -> _Method:
    """A decorator: one thread at a time runs the marked methods of an object."""

    @functools.wraps(method)
    def call(self: Lockable, *args: Any, **keywords: Any) -> Any:
        with self._lock:
            return method(self, *args, **keywords)

    return cast(_Method, call)


def lock_of(owner: Any) -> AbstractContextManager[Any]:
    """The lock of an object, as a context; an empty context for an object that is not `Lockable`."""
    return owner._lock if isinstance(owner, Lockable) else nullcontext()
