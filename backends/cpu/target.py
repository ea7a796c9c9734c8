"""A target of Numba for printed kernels: numbers, ranges and the words of kernels, and nothing else of Numba's.

Numba's own target loads all that it knows of NumPy, lists, strings and random numbers: longer than most kernels take
to compile. It also makes machine code of every function that a kernel calls, and wrappers that Python could call. This
one optimises the whole kernel once; what it computes is the same.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

NAME = "rulec"


#: Options of Numba's: kernels are called by machine code alone, so no function has wrappers for Python or C.
_OPTIONS = {"nopython": True, "boundscheck": None, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}


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
            return kind(py_func=function, targetoptions={**_OPTIONS, **options})
        from numba import njit

        return njit(**options)(function)

    return decorate


@functools.cache
def _dispatcher() -> Any:
    """The class of compiled functions for the small target; None where this Numba has no such targets."""
    try:
        from numba.core.dispatcher import Dispatcher
        from numba.core.registry import CPUTarget
        from numba.core.target_extension import CPU, dispatcher_registry, jit_registry, target_registry
        from numba.core.typing.context import BaseContext
        from numba.core.utils import threadsafe_cached_property

        context = _context()
    except ImportError:
        return None

    class Typing(BaseContext):
        def load_additional_registries(self) -> None:
            pass

        def resolve_value_type(self, value: Any) -> Any:
            """The type of a constant. Numba would load its lists and dictionaries to ask whether `bool` is one."""
            known = value is bool or value is range
            find = self._get_global_type if known else super().resolve_value_type
            return find(value)  # type: ignore[no-untyped-call]

    class Descriptor(CPUTarget):
        @threadsafe_cached_property
        def _toplevel_target_context(self) -> Any:
            return context(self.typing_context, NAME)

        @threadsafe_cached_property
        def _toplevel_typing_context(self) -> Any:
            return Typing()  # type: ignore[no-untyped-call]

    class Small(CPU):
        pass

    class Compiled(Dispatcher):
        targetdescr = Descriptor(NAME)  # type: ignore[no-untyped-call]

    def jit(*functions: Any, **options: Any) -> Any:
        """What Numba's own overloads are compiled by."""
        whole = {**_OPTIONS, **options}
        return Compiled(functions[0], targetoptions=whole) if functions else lambda f: Compiled(f, targetoptions=whole)

    target_registry[NAME], dispatcher_registry[Small], jit_registry[Small] = Small, Compiled, jit
    return Compiled


def _context() -> Any:
    """The class of what turns a typed function into LLVM assembly; ImportError where this Numba has other parts."""
    from numba.core.codegen import JITCodeLibrary, JITCPUCodegen
    from numba.core.cpu import CPUContext
    from numba.core.fastmathpass import rewrite_module

    class Library(JITCodeLibrary):
        """Optimised LLVM assembly, for an object file: it is not loaded."""

        def _finalize_specific(self) -> None:
            pass

        def _optimize_final_module(self) -> None:
            """Optimises a kernel once, with all that it calls."""
            if self.name in ("kernel", "enter"):
                super()._optimize_final_module()  # type: ignore[no-untyped-call]

    class Code(JITCPUCodegen):
        _library_class = Library

        def _add_module(self, module: Any) -> None:
            pass

    class Target(CPUContext):
        def init(self) -> None:
            super().init()
            self._internal_codegen = Code(NAME)  # type: ignore[no-untyped-call]

        def load_additional_registries(self) -> None:
            from numba.cpython import builtins, iterators, numbers, rangeobj, tupleobj  # noqa: F401

        def post_lowering(self, mod: Any, library: Any) -> None:
            """As Numba's own, but kernels allocate nothing: they are linked without its memory."""
            if self.fastmath:
                rewrite_module(mod, self.fastmath)  # type: ignore[no-untyped-call]

        def get_executable(self, library: Any, fndesc: Any, env: Any) -> Any:
            """A dummy builtin that registers `fndesc` with Numba.

            Kernels are run from object files.
            """
            library.finalize()
            return fndesc.__sizeof__

    return Target
