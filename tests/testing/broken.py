"""Backends with one fault each, made from the numpy backend: what the conformance suite must catch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rulec.backend.protocol import Rows
from rulec.compiler.ir import Program
from rulec.compiler.layout import Layout
from rulec.errors import BackendUnsupported
from rulec_backends.numpy import NumpyBackend, NumpyCall, NumpyKernel


class BrokenBackend(NumpyBackend):
    """The numpy backend with other calls and another source."""

    call: Callable[..., Any] = NumpyCall

    def build(self, program: Program, layout: Layout, source: str) -> NumpyKernel:
        kernel = NumpyKernel(program, layout, source)
        kernel.bind = lambda *bound: self.call(kernel, *bound)  # type: ignore[method-assign]
        return kernel


class WrongSign(BrokenBackend):
    """Steps uphill."""

    name = "wrong-sign"

    def emit(self, program: Program, layout: Layout) -> str:
        return super().emit(program, layout).replace("p - lr *", "p + lr *")


class WrongConstant(BrokenBackend):
    """Bias correction of the second moment from the first one's column: off by little after many steps, not at once."""

    name = "wrong-constant"

    def emit(self, program: Program, layout: Layout) -> str:
        return super().emit(program, layout).replace(" / sqrt_one_minus_beta2_t", " / one_minus_beta1_t")


class NoNan(BrokenBackend):
    """Keeps NaN out of what it stores."""

    name = "no-nan"

    class call(NumpyCall):
        def __call__(self, *args: Any, **options: Any) -> Any:
            params, states, reduced = super().__call__(*args, **options)
            for array in (*params, *(s for state in states for s in state.values())):
                array[np.isnan(array)] = 0
            return params, states, reduced


class IgnoresTensors(BrokenBackend):
    """Updates the first tensors of the right shapes, whichever are named."""

    name = "ignores-tensors"

    class call(NumpyCall):
        def __call__(
            self, stage: int, moving: Sequence[Any], rows: Rows, scratch: Any = None, *,
            tensors: Sequence[int] | None = None, stream: Any = None,
        ) -> Any:  # fmt: skip
            shapes = [p.shape for p in self._params]
            fired = None if tensors is None else [shapes.index(g.shape) for g in moving]
            return super().__call__(stage, moving, rows, scratch, tensors=fired, stream=stream)


class CountsOn(BrokenBackend):
    """Gives gradients to the first tensors, whichever are named, and fails where they do not fit."""

    name = "counts-on"

    class call(NumpyCall):
        def __call__(self, stage: int, moving: Sequence[Any], rows: Rows, *args: Any, **options: Any) -> Any:
            return super().__call__(stage, moving, rows, *args, **{**options, "tensors": range(len(moving))})


class OtherRows(BrokenBackend):
    """Reads the rows in the order of the tensors instead of by the index."""

    name = "other-rows"

    class call(NumpyCall):
        def __call__(self, stage: int, moving: Sequence[Any], rows: Rows, *args: Any, **options: Any) -> Any:
            index = np.arange(len(rows.index)) % len(rows.table)
            return super().__call__(stage, moving, Rows(rows.table, index), *args, **options)


class WritesGradients(BrokenBackend):
    """Uses gradients as scratch space."""

    name = "writes-gradients"

    class call(NumpyCall):
        def __call__(self, stage: int, moving: Sequence[Any], *args: Any, **options: Any) -> Any:
            written = super().__call__(stage, moving, *args, **options)
            for gradient in moving:
                gradient[...] = 0
            return written


class Copies(BrokenBackend):
    """Returns new arrays, although NumPy's can be written."""

    name = "copies"

    class call(NumpyCall):
        def __call__(self, *args: Any, **options: Any) -> Any:
            params, *rest = super().__call__(*args, **options)
            return [p.copy() for p in params], *rest


class Uphill(BrokenBackend):
    """Forgets `maximize`."""

    name = "forgets-maximize"

    def emit(self, program: Program, layout: Layout) -> str:
        return super().emit(program, layout).replace("g = -g_stored", "g = g_stored")


class Truncates(BrokenBackend):
    """Rounds towards zero as it stores bfloat16."""

    name = "truncates"

    def emit(self, program: Program, layout: Layout) -> str:
        source = super().emit(program, layout)
        return source.replace("xp.asarray(p_new, dtype", "xp.asarray((p_new.view('u4') & 0xFFFF0000).view('f4'), dtype")


class Counts(BrokenBackend):
    """Prints something else every time."""

    name = "counts"
    number = itertools.count()

    def emit(self, program: Program, layout: Layout) -> str:
        return super().emit(program, layout) + f"# {next(self.number)}\n"


class Imports(BrokenBackend):
    """Imports a framework to print."""

    name = "imports"

    def emit(self, program: Program, layout: Layout) -> str:
        import torch

        return super().emit(program, layout) + f"# {torch.float32}\n"


class Crashes(BrokenBackend):
    """Takes every program for an elementwise one."""

    name = "crashes"

    def emit(self, program: Program, layout: Layout) -> str:
        if not program.elementwise:
            raise KeyError("norm")
        return super().emit(program, layout)


class Elementwise(BrokenBackend):
    """Refuses reductions."""

    name = "elementwise"

    def emit(self, program: Program, layout: Layout) -> str:
        if not program.elementwise:
            raise BackendUnsupported(self.name, "reductions", program.name)
        return super().emit(program, layout)


class Chatty(BrokenBackend):
    """Gives a reason of two lines."""

    name = "chatty"

    def unavailable_reason(self) -> str | None:
        return "there is no GPU\nor none that is seen"
