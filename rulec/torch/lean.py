"""Keeping torch's compiler out, and methods of `torch.optim.Optimizer` without the import that their first call costs.

torch marks methods its compiler must not trace, and to do so imports the compiler, and sympy with it, at the first
call: more than a second, for programs that compile nothing. Until the compiler is there, there is nothing to mark.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

frame_callback: Callable[[], Any]
try:
    #: What watches the functions that run in this thread: None outside of what torch compiles.
    from torch._C._dynamo.eval_frame import get_eval_frame_callback as frame_callback
except ImportError:  # an older torch, whose compiler looks inside a step and finds nothing it can use

    def frame_callback() -> None: ...


_P = ParamSpec("_P")
_R = TypeVar("_R")


def without_compiler(method: Callable[_P, _R]) -> Callable[_P, _R]:
    """The method as it is where torch's compiler is loaded, else as it was before it was marked."""
    plain = inspect.unwrap(method)

    @functools.wraps(plain)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        return (method if "torch._dynamo" in sys.modules else plain)(*args, **kwargs)

    return call
