"""How this package makes its own tensors, computes with them, and keeps torch's compiler out of its methods."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor


def plain_memory() -> ExitStack:
    """A context in which tensors are ordinary ones and nothing is recorded, whatever the caller's own context."""
    stack = ExitStack()
    stack.enter_context(torch.inference_mode(False))
    stack.enter_context(torch.no_grad())
    return stack


def plain_arithmetic(types: Iterable[str]) -> ExitStack:
    """A context as `plain_memory`, where torch also computes in its operands' dtypes on the devices of these types."""
    stack = plain_memory()
    for kind in types:
        stack.enter_context(torch.autocast(kind, enabled=False))
    return stack


def resolved(tensor: Tensor) -> Tensor:
    """The same numbers as memory has them: torch leaves it to who reads a view to negate or conjugate its memory."""
    return tensor.resolve_conj().resolve_neg()


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
