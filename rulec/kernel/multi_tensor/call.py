"""Calls of a kernel bound to the tensors of a bucket, on all machines and in main memory.

In main memory, the data of a stage over a bucket are chunks, slots, and the arguments of each call.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np

from rulec.backend.protocol import Rows, Scratch, Written
from rulec.compiler.ir import Program, Stage
from rulec.compiler.layout import Layout
from rulec.compiler.view import MatrixView
from rulec.errors import InternalError
from rulec.kernel.multi_tensor.arguments import Moving
from rulec.kernel.place import COL, is_shaped, place
from rulec.kernel.quantized import coded_arrays, coded_lines

from .address import address_of, addresses_of, array_address, element_count
from .chunks import CHUNK_COLUMNS, FLAT_COLUMNS, Chunks, Policy, chunk_columns
from .cut import Cut, Tensors, Whole
from .slots import LineSlots, TensorSlots, regions, slots_of


@dataclass
class Work:
    """The data of a stage."""

    chunks: Chunks
    spans: Whole
    moving: list[Moving]
    slots: dict[str, TensorSlots | LineSlots]

    def spans_of(self, fired: tuple[int, ...] | None) -> Whole:
        """The spans of these tensors, or of all."""
        return self.spans if fired is None else self.chunks.spans(fired)


class Planner:
    """Prepares the data of each stage of a program over tensors of these sizes and views, by a machine's `policy`.

    With `flat`, chunks have no matrices in any stage.
    """

    def __init__(
        self, backend: str, program: Program, layout: Layout, sizes: Sequence[int], views: Sequence[MatrixView],
        policy: Policy, flat: bool = False,
    ) -> None:  # fmt: skip
        self._tensors = Tensors(backend, program, layout, sizes, views)
        self.lines = coded_lines(program, layout)
        self._policy, self._only_flat = policy, flat
        self._flat_columns = [*FLAT_COLUMNS, *[""] * (chunk_columns(program, layout) - len(FLAT_COLUMNS))]
        self._known: dict[str, tuple[Chunks, Cut]] = {}

    def work(self, stage: Stage) -> Work:
        """The data of a stage."""
        tensors = self._tensors
        chunks, cut = self._chunks(stage)
        stage_regions = regions(stage, tensors.layout, chunks.cut, tensors.lying, cut)
        slots = {region.name: slots_of(region) for region in stage_regions}
        return Work(chunks, chunks.spans(range(len(tensors.sizes))), tensors.moving(stage, self.lines), slots)

    def _chunks(self, stage: Stage) -> tuple[Chunks, Cut]:
        """A stage's chunks, and the cut of its rows and columns. Stages of one kind share them."""
        tensors, policy = self._tensors, self._policy
        vectors = [*stage.reduces, *map(tensors.program.result, stage.reads)]
        tall = any(place(r.axes, tensors.layout) == COL for r in vectors)
        shaped = is_shaped(tensors.program, stage, tensors.layout)
        kind = ("tall" if tall else "wide") if shaped else "flat"
        if kind not in self._known:
            flat = policy.flat(tensors.seen(False))
            cut = policy.cut(tensors.seen(True), tall) if shaped else flat
            if shaped and not self._only_flat:
                chunks = Chunks(cut, CHUNK_COLUMNS, policy)
            else:
                chunks = Chunks(flat, self._flat_columns, policy)
            self._known[kind] = chunks, cut
        return self._known[kind]


#: The data of a stage on a machine.
Needs = TypeVar("Needs")


class BucketCall(ABC, Generic[Needs]):
    """A kernel bound to the parameters and states of one bucket. One thread at a time may call it.

    `_works` has the data of each stage, None for a stage without values.
    """

    backend: ClassVar[str]
    _works: Sequence[Needs | None]

    def __init__(self, params: Sequence[Any], states: Sequence[dict[str, Any]]) -> None:
        self._params, self._states = params, states
        self._everything = range(len(params))
        #: The gradients whose addresses are known: the identity of their list, and the tensors fired.
        self._last: tuple[int, tuple[int, ...] | None] | None = None

    def __call__(
        self, stage: int, moving: Sequence[Any], rows: Rows, scratch: Scratch | None = None, *,
        tensors: Sequence[int] | None = None, stream: Any = None,
    ) -> Written:  # fmt: skip
        """Runs a stage over every tensor of the bucket, or `tensors` of it, in place.

        A list of gradients for several stages, one after the other, is not changed between them. Reductions are valid
        until their tensor's next pass through the stage: some are memory of the kernel.
        """
        if not stage:
            self._last = None
        work = self._works[stage]
        if work is None:
            return Written(self._params, self._states)
        fired = None if tensors is None else tuple(tensors)
        reduced = self._run(work, stage, moving, rows, scratch or {}, fired, stream)
        return Written(self._params, self._states, reduced)

    @abstractmethod
    def _run(
        self, work: Needs, stage: int, moving: Sequence[Any], rows: Rows, scratch: Scratch,
        fired: tuple[int, ...] | None, stream: Any,
    ) -> Mapping[str, Any]:  # fmt: skip
        """Runs a stage over these tensors, or over all. Returns its reductions by name."""


class AddressedCall(BucketCall[Needs]):
    """A call of kernels that read gradients by their addresses."""

    def __init__(self, params: Sequence[Any], states: Sequence[dict[str, Any]]) -> None:
        super().__init__(params, states)
        self._gradients: Whole = np.zeros(len(params), np.int64)
        self._first: Callable[[], Any] = _nothing

    def _read_gradients(self, moving: Sequence[Any], fired: tuple[int, ...] | None) -> Whole:
        """The addresses of gradients, old ones for tensors that do not fire; InternalError for too few gradients."""
        # The stages of a step are called with one list of gradients: the first one reads its addresses.
        if self._last != (id(moving), fired) or self._first() is not next(iter(moving), None):
            count = len(self._params if fired is None else fired)
            if len(moving) != count:
                raise InternalError(f"the {self.backend} kernel needs {count} gradients and was given {len(moving)}")
            self._gradients[slice(None) if fired is None else list(fired)] = self._addresses(moving)
            self._last = (id(moving), fired)
            # Not the list itself: a step that ends early must not keep its gradients in memory.
            self._first = weakref.ref(moving[0]) if moving else _nothing
        return self._gradients

    @abstractmethod
    def _addresses(self, moving: Sequence[Any]) -> Sequence[int] | Whole:
        """The addresses of gradients."""


class PlannedCall(AddressedCall[Work]):
    """A kernel in main memory that reads addresses from a table, with a line for each of `address_lines`.

    It has chunks, slots for reductions and addresses; subclasses launch the stage.
    """

    def __init__(
        self, program: Program, layout: Layout, params: Sequence[Any], states: Sequence[dict[str, Any]],
        views: Sequence[MatrixView], policy: Policy, flat: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(params, states)
        plan = Planner(self.backend, program, layout, [element_count(p) for p in params], views, policy, flat)
        self._works = [plan.work(stage) if stage.roots else None for stage in program.stages]
        self._pointers = np.zeros((len(plan.lines), len(params)), np.int64)
        self._gradients = self._pointers[plan.lines.index("g")]
        self._address = address_of(params)
        for name, arrays in coded_arrays(program, layout, params, states).items():
            self._pointers[plan.lines.index(name)] = [*map(self._address, arrays)]
        for work in filter(None, self._works):
            for name, slots in work.slots.items():
                self._pointers[plan.lines.index(name)] = [*map(array_address, slots.arrays())]

    def _addresses(self, moving: Sequence[Any]) -> Sequence[int]:
        return addresses_of(moving, self._address)  # type: ignore[no-any-return]

    def _run(
        self, work: Work, stage: int, moving: Sequence[Any], rows: Rows, scratch: Scratch,
        fired: tuple[int, ...] | None, stream: Any,
    ) -> Mapping[str, Any]:  # fmt: skip
        self._read_gradients(moving, fired)
        for line in work.moving:
            arrays = line.take(scratch, self._everything if fired is None else fired)
            at = slice(None) if fired is None else list(fired)
            self._pointers[line.line, at] = [*map(address_of(arrays), arrays)]
        self._launch(work, stage, rows, fired)
        return Finished(work.slots, fired)

    @abstractmethod
    def _launch(self, work: Work, stage: int, rows: Rows, fired: tuple[int, ...] | None) -> None:
        """Runs a stage over these tensors, or over all."""


class Finished(Mapping[str, Any]):
    """The reductions of these tensors by name, each finished when it is read, from slots in main memory."""

    def __init__(self, slots: Mapping[str, Any], fired: tuple[int, ...] | None) -> None:
        self._slots, self._fired = slots, fired

    def __getitem__(self, name: str) -> Any:
        return self._slots[name].finished(self._fired)

    def __iter__(self) -> Iterator[str]:
        return iter(self._slots)

    def __len__(self) -> int:
        return len(self._slots)


def _nothing() -> None:
    """The first gradient of an empty list: None."""
