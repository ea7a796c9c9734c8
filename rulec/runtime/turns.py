"""One thread at a time: what steps share (states, counts, scratch, tables of addresses) is for one step alone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from threading import RLock
from typing import Any, Self, TypeVar, cast

_Method = TypeVar("_Method", bound=Callable[..., Any])


class Turns:
    """What threads use in turns: methods marked `in_turn`, and blocks `with self._turn`, wait for each other.

    The thread that has the turn does not wait for itself. A copy has a turn of its own.
    """

    def __new__(cls, *args: Any, **keywords: Any) -> Self:
        made = super().__new__(cls)
        made._turn = RLock()
        return made

    _turn: RLock

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_turn"}


def in_turn(method: _Method) -> _Method:
    """The method, run by one thread at a time among all methods of an object that are marked so."""

    @functools.wraps(method)
    def call(self: Turns, *args: Any, **keywords: Any) -> Any:
        with self._turn:
            return method(self, *args, **keywords)

    return cast(_Method, call)


def turn_of(owner: Any) -> AbstractContextManager[Any]:
    """The turn of an object, to be had together with another's; nothing for one that is not ours."""
    return owner._turn if isinstance(owner, Turns) else nullcontext()
