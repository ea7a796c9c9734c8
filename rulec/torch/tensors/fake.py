"""Fake tensors, which have a shape and no memory: a step of them allocates like any step, and computes nothing.

So `torch`'s fake mode forecasts the memory of a training before there is a machine with that memory. States are fake
too, and no kernel runs. The work between kernels goes through torch's operations, as it does on a device. This module
also makes the package's own tensors, computes with them, and keeps torch's compiler out of its methods.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from rulec.backend.capabilities import DTYPES, QuinticProducts
from rulec.backend.protocol import Rows, Scratch, Written
from rulec.compiler.ir import Axes, Program
from rulec.compiler.layout import Layout
from rulec.compiler.view import MatrixView
from rulec.errors import BackendUnsupported
from rulec.torch.products import ShapesProducts

_MODULE = "torch._subclasses.fake_tensor"


def is_fake(tensor: Any) -> bool:
    """Whether a tensor has no memory."""
    module = sys.modules.get(_MODULE)
    return module is not None and isinstance(tensor, module.FakeTensor)


def has_no_memory(value: Any) -> bool:
    """Whether this is a tensor that is fake, or on the meta device."""
    return is_fake(value) or (isinstance(value, Tensor) and value.is_meta)


def real_memory() -> AbstractContextManager[Any]:
    """A context in which new tensors have memory, whatever mode the caller is in."""
    module = sys.modules.get(_MODULE)
    return nullcontext() if module is None else module.unset_fake_temporarily()


def address_of(tensors: Sequence[Tensor]) -> Callable[[Tensor], int]:
    """A function from one of these tensors to its address: 0 for all of them where any is fake."""
    return (lambda tensor: 0) if any(map(is_fake, tensors)) else Tensor.data_ptr


class ShapesBackend:
    """A backend for fake tensors: its kernels have the results that others' have, by their shapes, and no values."""

    name = "shapes"
    on_device = True
    narrow = True

    def unavailable_reason(self) -> None:
        """None: there is nothing to run."""

    def emit(self, program: Program, layout: Layout) -> str:
        """No source."""
        return ""

    def build(self, program: Program, layout: Layout, source: str) -> ShapesKernel:
        """A kernel of no code."""
        return ShapesKernel(program)

    def decodes(self, program: Program, layout: Layout) -> bool:
        """True: states in codes need no other memory."""
        return True

    def has_quintic(self, device: torch.device) -> bool:
        """True: large matrices are stacked, as on GPUs."""
        return True

    def emit_quintic(self, dtype: str) -> str:
        """No source. BackendUnsupported for a dtype of which no GPU's backend has products."""
        if dtype not in DTYPES:
            raise BackendUnsupported(self.name, f"products of matrices in {dtype}", "newton_schulz")
        return ""

    def build_quintic(self, dtype: str, source: str) -> QuinticProducts:
        """torch's products, for the matrices that a GPU's backend takes."""
        return ShapesProducts()

    def emit_segments(self) -> str:
        """No source."""
        return ""

    def build_segments(self, source: str) -> Callable[..., Any]:
        """A function without results: fake numbers are never reduced."""
        return lambda op, values, ends: None

    def emit_draws(self) -> str:
        """No source."""
        return ""

    def build_draws(self, source: str) -> Callable[..., None]:
        """A function that does nothing: a kernel writes random numbers in place."""
        return lambda *arguments, **position: None

    def fill_noise(self, out: Any, noise: Any, offset: int = 0) -> None:
        """Does nothing: a kernel writes noise in place."""


@dataclass(frozen=True)
class ShapesKernel:
    """A program of which nothing is computed."""

    program: Program

    def bind(self, params: Sequence[Any], states: Sequence[dict[str, Any]], views: Sequence[MatrixView] = ()) -> Any:
        """A call over these tensors; it keeps its reductions' results from call to call, like one on a device."""
        params, states = list(params), list(states)
        reduced = [
            {r.name: _results(r.axes, params, views) for r in stage.reduces} for stage in self.program.stages
        ]  # fmt: skip

        def call(
            stage: int, moving: Sequence[Any], rows: Rows, scratch: Scratch | None = None, *,
            tensors: Sequence[int] | None = None, stream: Any = None,
        ) -> Written:  # fmt: skip
            return Written(params, states, {name: _of(result, tensors) for name, result in reduced[stage].items()})

        return call


def _results(axes: Axes, params: Sequence[Tensor], views: Sequence[MatrixView]) -> Any:
    """A reduction's results: a number for each tensor, or an array of its rows or columns for each."""
    if axes.number:
        return params[0].new_zeros(len(params), dtype=torch.float64)
    shapes = [(v.batch, 1 if axes.rows is None else v.rows, 1 if axes.cols is None else v.cols) for v in views]
    return [p.new_zeros(shape, dtype=torch.float64) for p, shape in zip(params, shapes, strict=True)]


def _of(result: Any, tensors: Sequence[int] | None) -> Any:
    if tensors is None:
        return result
    return [result[i] for i in tensors] if isinstance(result, list) else result.new_zeros(len(tensors))


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
    #: The callback for functions that run in this thread: None outside of code that torch compiles.
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
