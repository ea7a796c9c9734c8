"""Backends with one fault each in what they make of stages: reductions, views, vectors, scratch, late columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rulec.backend.protocol import Rows, Written
from rulec.compiler.ir import Program
from rulec.compiler.layout import Layout
from rulec.compiler.view import MatrixView
from rulec_backends.numpy import NumpyCall
from tests.testing.broken import BrokenBackend


class Changed(NumpyCall):
    """A call whose reductions are changed on their way out."""

    def change(self, value: Any, fired: int) -> Any:
        raise NotImplementedError

    def __call__(self, stage: int, moving: Sequence[Any], *args: Any, **options: Any) -> Written:
        written = super().__call__(stage, moving, *args, **options)
        with np.errstate(all="ignore"):
            return written._replace(
                reduced={
                    name: [self.change(x, len(moving)) for x in found]
                    if isinstance(found, list)
                    else self.change(found, len(moving))
                    for name, found in written.reduced.items()
                }
            )


class Replaced(BrokenBackend):
    """Prints one thing for another."""

    old, new = "", ""

    def emit(self, program: Program, layout: Layout) -> str:
        return super().emit(program, layout).replace(self.old, self.new)


class RowsForColumns(Replaced):
    """Reduces along the wrong side."""

    name = "rows-for-columns"
    old, new = "axis=1", "axis=2"


class SkipsNan(Replaced):
    """Sums what is a number."""

    name = "skips-nan"
    old, new = "xp.sum(", "xp.nansum("


class Careless(Replaced):
    """Computes a little less than it should where a late column is read."""

    name = "careless"
    old, new = "m_new / size", "m_new / (size * 1.000001)"


class ForgetsScratch(Replaced):
    """Leaves scratch as it was."""

    name = "forgets-scratch"
    old, new = "m_new_plus_p[...] =", "unused ="


class InMemory(BrokenBackend):
    """Takes the rows in memory for the rule's, where those are the columns."""

    name = "in-memory"

    class call(NumpyCall):
        def __init__(self, kernel: Any, params: Any, states: Any, views: Sequence[MatrixView] = ()) -> None:
            super().__init__(kernel, params, states, [replace(view, transposed=False) for view in views])


class Single(BrokenBackend):
    """Sums in float32."""

    name = "single"

    class call(Changed):
        def change(self, value: Any, fired: int) -> Any:
            return value.astype(np.float32).astype(np.float64)


class NothingIsZero(BrokenBackend):
    """Takes the least of nothing for zero."""

    name = "nothing-is-zero"

    class call(Changed):
        def change(self, value: Any, fired: int) -> Any:
            return np.where(np.isinf(value), 0.0, value)


class Neighbours(BrokenBackend):
    """Rounds otherwise where there are several tensors."""

    name = "neighbours"

    class call(Changed):
        def change(self, value: Any, fired: int) -> Any:
            return value * (1 + 2.0**-52) if fired > 1 else value


class Restless(BrokenBackend):
    """Rounds otherwise every other time."""

    name = "restless"

    class call(Changed):
        turn = 0

        def change(self, value: Any, fired: int) -> Any:
            Restless.call.turn += 1
            return value * (1 + 2.0**-52) if Restless.call.turn % 2 else value


class Short(BrokenBackend):
    """Gives no reduction for the last tensor."""

    name = "short"

    class call(Changed):
        def __call__(self, *args: Any, **options: Any) -> Written:
            written = NumpyCall.__call__(self, *args, **options)
            return written._replace(reduced={name: found[:-1] for name, found in written.reduced.items()})


class Nameless(BrokenBackend):
    """Gives no reductions."""

    name = "nameless"

    class call(NumpyCall):
        def __call__(self, *args: Any, **options: Any) -> Written:
            return super().__call__(*args, **options)._replace(reduced={})


class Flat(BrokenBackend):
    """Gives rows and columns without their other dimensions."""

    name = "flat"

    class call(Changed):
        def change(self, value: Any, fired: int) -> Any:
            return value.reshape(-1)


class OldColumns(BrokenBackend):
    """Reads the scalar table once a step: before its late columns are there."""

    name = "old-columns"

    class call(NumpyCall):
        def __call__(self, stage: int, moving: Sequence[Any], rows: Rows, *args: Any, **options: Any) -> Written:
            self.rows = rows if stage == 0 else self.rows
            return super().__call__(stage, moving, self.rows, *args, **options)


class OldVectors(BrokenBackend):
    """Keeps the vectors that it saw first, by name and shape of what they belong to."""

    name = "old-vectors"

    class call(NumpyCall):
        def __call__(
            self, stage: int, moving: Sequence[Any], rows: Rows, scratch: Mapping[str, Any] | None = None,
            **options: Any,
        ) -> Written:  # fmt: skip
            kept = vars(self).setdefault("kept", {})
            reads = self._kernel.program.stages[stage].reads
            old = {
                name: [kept.setdefault((name, g.shape), x) for g, x in zip(moving, arrays, strict=True)]
                if name in reads
                else arrays
                for name, arrays in (scratch or {}).items()
            }
            return super().__call__(stage, moving, rows, old, **options)


class WritesVectors(BrokenBackend):
    """Uses vectors as memory."""

    name = "writes-vectors"

    class call(NumpyCall):
        def __call__(
            self, stage: int, moving: Sequence[Any], rows: Rows, scratch: Mapping[str, Any] | None = None,
            **options: Any,
        ) -> Written:  # fmt: skip
            written = super().__call__(stage, moving, rows, scratch, **options)
            for name in self._kernel.program.stages[stage].reads:
                for array in (scratch or {})[name]:
                    array[...] = 0
            return written


class StoresEarly(BrokenBackend):
    """Moves parameters in the first stage already."""

    name = "stores-early"

    class call(NumpyCall):
        def __call__(self, stage: int, *args: Any, **options: Any) -> Written:
            written = super().__call__(stage, *args, **options)
            if stage == 0 and len(self._kernel.program.stages) > 1:
                for param in written.params:
                    param += 1
            return written
