"""A kernel bound to the tensors of a bucket: addresses, and what each stage needs."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np

from rulec.backend.protocol import Rows, Scratch, Written
from rulec.compiler.ir import Program
from rulec.compiler.layout import Layout
from rulec.compiler.view import MatrixView
from rulec.kernel.place import bound_arrays

from .address import address_of, array_address, element_count
from .chunks import Policy
from .work import Planner, Work


class PlannedCall(ABC):
    """Machine code bound to the parameters and states of one bucket, whose stages read addresses from a table.

    It has chunks, slots for reductions and addresses; who runs a stage says how. One thread at a time may call it.
    """

    backend: ClassVar[str]

    def __init__(
        self, program: Program, layout: Layout, params: Sequence[Any], states: Sequence[dict[str, Any]],
        views: Sequence[MatrixView], policy: Policy, flat: bool = False,
    ) -> None:  # fmt: skip
        plan = Planner(self.backend, program, layout, [element_count(p) for p in params], views, policy, flat)
        self._params, self._states = params, states
        self._everything = range(len(params))
        self._works = [plan.work(stage) if stage.roots else None for stage in program.stages]
        self._pointers = np.zeros((len(plan.lines), len(params)), np.int64)
        self._gradients = plan.lines.index("g")
        self._address = address_of(params)
        self._last: tuple[int, tuple[int, ...] | None] = (0, None)
        self._first: Callable[[], Any] = _nothing
        for name, arrays in bound_arrays(program, params, states).items():
            self._pointers[plan.lines.index(name)] = [*map(self._address, arrays)]
        for work in filter(None, self._works):
            for name, slots in work.slots.items():
                self._pointers[plan.lines.index(name)] = [*map(array_address, slots.arrays())]

    def __call__(
        self, stage: int, moving: Sequence[Any], rows: Rows, scratch: Scratch | None = None, *,
        tensors: Sequence[int] | None = None, stream: Any = None,
    ) -> Written:  # fmt: skip
        """Runs a stage over every tensor of the bucket, or `tensors` of it, in place.

        A list of gradients that is given to several stages, one after the other, is not changed between them.
        Reductions per row and column hold until their tensor's next pass through the stage: some are the kernel's own.
        """
        work = self._works[stage]
        if work is None:
            return Written(self._params, self._states)
        fired = None if tensors is None else tuple(tensors)
        self._point(work, stage, moving, scratch or {}, fired)
        self._run(work, stage, rows, fired)
        reduced = {name: slots.finished(fired) for name, slots in work.slots.items()}
        return Written(self._params, self._states, reduced)

    def _point(
        self, work: Work, stage: int, moving: Sequence[Any], scratch: Scratch, fired: tuple[int, ...] | None
    ) -> None:
        """Fills in the addresses that come with a call."""
        at = slice(None) if fired is None else list(fired)
        # The stages of a step are called with one list of gradients: its addresses are read at the first.
        if not stage or self._last != (id(moving), fired) or self._first() is not next(iter(moving), None):
            self._pointers[self._gradients, at] = [*map(self._address, moving)]
            self._last = (id(moving), fired)
            # Not the list itself: a step that ends early must not keep its gradients in memory.
            self._first = weakref.ref(moving[0]) if moving else _nothing
        for line in work.moving:
            arrays = line.take(scratch, self._everything if fired is None else fired)
            self._pointers[line.line, at] = [*map(address_of(arrays), arrays)]

    @abstractmethod
    def _run(self, work: Work, stage: int, rows: Rows, fired: tuple[int, ...] | None) -> None:
        """Does a stage's work for these tensors, or for all."""


def _nothing() -> None:
    """What is left of gradients where there were none."""
