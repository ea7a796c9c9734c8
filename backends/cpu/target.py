"""A target of Numba for printed kernels: numbers, ranges and the words of kernels, and nothing else of Numba's.

Numba's own target loads all that it knows of NumPy, lists, strings and random numbers: longer than most kernels take
to compile. The machine code is the same.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

NAME = "rulec"


class _Choice(threading.local):
    """Whether functions are compiled for the small target in this thread."""

    small = False


_choice = _Choice()


@contextmanager
def small_target() -> Iterator[bool]:
    """Inside, functions are compiled for the small target; False where this Numba has no such targets."""
    if _dispatcher() is None:
        yield False
        return
    from numba.core.target_extension import target_override

    with target_override(NAME):  # type: ignore[no-untyped-call]
        before, _choice.small = _choice.small, True
        try:
            yield True
        finally:
            _choice.small = before


def compiled(options: dict[str, Any]) -> Callable[[Any], Any]:
    """The decorator of functions to compile, with options of Numba's."""

    def decorate(function: Any) -> Any:
        kind = _dispatcher() if _choice.small else None
        if kind is not None:
            return kind(py_func=function, targetoptions={"nopython": True, "boundscheck": None, **options})
        from numba import njit

        return njit(**options)(function)

    return decorate


@functools.cache
def _dispatcher() -> Any:
    """The class of compiled functions for the small target; None where this Numba has no such targets."""
    try:
        from numba.core.cpu import CPUContext
        from numba.core.dispatcher import Dispatcher
        from numba.core.registry import CPUTarget
        from numba.core.target_extension import CPU, dispatcher_registry, jit_registry, target_registry
        from numba.core.typing.context import BaseContext
        from numba.core.utils import threadsafe_cached_property
    except ImportError:
        return None

    class Typing(BaseContext):
        def load_additional_registries(self) -> None:
            pass

    class Target(CPUContext):
        def load_additional_registries(self) -> None:
            from numba.core.runtime.nrt import rtsys
            from numba.cpython import builtins, iterators, numbers, rangeobj, tupleobj  # noqa: F401

            rtsys.initialize(self)

    class Descriptor(CPUTarget):
        @threadsafe_cached_property
        def _toplevel_target_context(self) -> Any:
            return Target(self.typing_context, NAME)  # type: ignore[no-untyped-call]

        @threadsafe_cached_property
        def _toplevel_typing_context(self) -> Any:
            return Typing()  # type: ignore[no-untyped-call]

    class Small(CPU):
        pass

    class Compiled(Dispatcher):
        targetdescr = Descriptor(NAME)  # type: ignore[no-untyped-call]

    def jit(*functions: Any, **options: Any) -> Any:
        """What Numba's own overloads are compiled by."""
        whole = {"nopython": True, "boundscheck": None, **options}
        return Compiled(functions[0], targetoptions=whole) if functions else lambda f: Compiled(f, targetoptions=whole)

    target_registry[NAME], dispatcher_registry[Small], jit_registry[Small] = Small, Compiled, jit
    return Compiled
