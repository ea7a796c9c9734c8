"""Calls of a CUDA C kernel bound to tensors: its tables on the device, and its launches.

Constant tables are copied to the device once. The table of a call is copied only when changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rulec.array_api.slices import Together
from rulec.backend.protocol import Rows, Scalars, Scratch
from rulec.compiler.ir import Program
from rulec.compiler.layout import Layout
from rulec.compiler.view import MatrixView
from rulec.kernel.multi_tensor.call import AddressedCall
from rulec.kernel.multi_tensor.cut import Tensors, Whole
from rulec.kernel.multi_tensor.uploads import CallArguments, Ring, Uploads
from rulec.kernel.place import bound_arrays

from ..common.scalars import arguments, has_scalars, scalar_leaves
from .coded import bound_in, scales_of
from .memory import Functions, Memory, used
from .plan import GIVEN, PACK, given_lines
from .work import Planner, Work

#: The number of sets of fired tensors with remembered tables.
_PARTS = 256


class CudaCall(AddressedCall[Work]):
    """A kernel bound to the parameters and states of one bucket, for blocks of `threads` threads.

    With the `ring` of other calls, the constructor does not wait for the copies of its tables: only the stream current
    at that time may run the call.
    """

    backend = "cupy"

    def __init__(
        self, program: Program, layout: Layout, functions: Functions, threads: int, memory: Memory,
        params: Sequence[Any], states: Sequence[dict[str, Any]], views: Sequence[MatrixView],
        ring: Ring | None = None, narrow: Callable[[], Functions] | None = None,
    ) -> None:  # fmt: skip
        """`narrow` makes the kernels for gradients at any address beside aligned arrays."""
        super().__init__(params, states)
        self._narrow = narrow
        self._narrow_functions: Functions | None = None
        self._program, self._layout, self._functions = program, layout, functions
        self._threads, self._memory = threads, memory
        per_call = given_lines(program)
        words = (len(GIVEN) + len(per_call) + len(program.columns)) * len(params)
        self._ring = ring or Ring(memory)
        uploads = Uploads(self._ring, words, spares=0 if ring else len(program.stages))
        self._line = len(GIVEN) + per_call.index("g")
        with used(memory) as stream:
            tensors = Tensors(self.backend, program, layout, [_count(p) for p in params], views)
            planner = Planner(tensors, memory)
            self._works = [planner.work(i) for i in range(len(program.stages))]
            bound = self._bound_addresses()
            self._low = [np.bitwise_or.reduce(bound[:, w.bound], axis=1) if w else bound[:, 0] for w in self._works]
            self._bound = DeviceTable(bound, self._ring, stream)
            self._whole = {i: self._tables(w, self._everything, stream) for i, w in enumerate(self._works) if w}
            self._call_table = GivenTable(len(params), len(per_call), uploads)
            if ring is None:  # now any stream may use the tables
                stream.synchronize()
        self._parts: dict[Any, tuple[DeviceTable, DeviceTable]] = {}
        self._captured: list[tuple[DeviceTable, DeviceTable]] = []

    def _bound_addresses(self) -> Whole:
        """The fixed addresses of each tensor: of its parameter, states and slots."""
        arrays = bound_arrays(self._program, self._params, self._states) | scales_of(self._layout, self._states)
        columns: dict[str, Any] = {n: [*map(self._memory.address, each)] for n, each in arrays.items()}
        for work in filter(None, self._works):
            columns |= work.slots.addresses()
        lines = bound_in(self._program, self._layout)
        table = np.zeros((len(self._params), len(lines)), np.int64)
        for column, name in enumerate(lines):
            table[:, column] = columns[name]
        return table

    def _tables(self, work: Work, fired: Sequence[int], stream: Any) -> tuple[DeviceTable, DeviceTable]:
        """The tables on the device for these tensors: their chunks, and the work of `finish`."""
        chunks, finish = work.tables(fired)
        return DeviceTable(chunks, self._ring, stream), DeviceTable(finish, self._ring, stream)

    def _run(
        self, work: Work, stage: int, moving: Sequence[Any], rows: Rows, scratch: Scratch,
        fired: tuple[int, ...] | None, stream: Any,
    ) -> Mapping[str, Any]:  # fmt: skip
        with used(self._memory, stream) as current:
            chunks, finish = self._whole[stage] if fired is None else self._part(stage, work, fired, current)
            if chunks.count:
                self._point(work, moving, scratch, fired)
                # A capture loads no kernels: what is not loaded yet is left to the common ones.
                narrow = self._narrow is not None and not (self._narrow_functions is None and current.is_capturing())
                odd = self._call_table.fill(work, self._low[stage], rows, fired, narrow)
                at, table = self._call_table.send(rows, self._memory, current)
                scale, stays = (0 if x is None else self._memory.address(x) for x in (rows.scale, rows.stays))
                addresses = (chunks.at, self._bound.at, at, table, stays, scale)
                self._launch(work.kernel, chunks.count, addresses, self._for_odd() if odd else None)
            if finish.count:
                self._launch("finish", finish.count, (finish.at,))
        return work.slots.results(self._everything if fired is None else fired)

    def _part(self, stage: int, work: Work, fired: tuple[int, ...], stream: Any) -> tuple[DeviceTable, DeviceTable]:
        """The tables for some of the tensors, kept for the next call.

        Tables made while a graph is captured stay for good: each replay of the graph fills them.
        """
        key = stage, fired, stream.ptr
        tables = self._parts.get(key) or self._tables(work, fired, stream)
        if stream.is_capturing():
            self._captured.append(tables)
        elif key not in self._parts:
            if len(self._parts) >= _PARTS:
                self._parts.clear()
            self._parts[key] = tables
        return tables

    def _point(self, work: Work, moving: Sequence[Any], scratch: Scratch, fired: tuple[int, ...] | None) -> None:
        """Writes the addresses of a call's arrays into the table."""
        words = self._call_table.words
        words[:, self._line] = self._read_gradients(moving, fired)
        at: Any = slice(None) if fired is None else list(fired)
        for line in work.moving:
            arrays = line.take(scratch, self._everything if fired is None else fired)
            words[at, len(GIVEN) + line.line] = self._addresses(arrays)

    def _addresses(self, moving: Sequence[Any]) -> Sequence[int] | Whole:
        if isinstance(moving, Together):
            return moving.addresses(self._memory.address)
        return np.fromiter(map(self._memory.address, moving), np.int64, len(moving))

    def _for_odd(self) -> Functions:
        """The kernels for gradients at any address, compiled at the first need."""
        assert self._narrow is not None
        self._narrow_functions = self._narrow_functions or self._narrow()
        return self._narrow_functions

    def _launch(
        self, kernel: str, blocks: int, arguments: tuple[int, ...], functions: Functions | None = None
    ) -> None:  # fmt: skip
        (functions or self._functions)(kernel)((blocks,), (self._threads,), arguments)

    def scalars(self, known: Scalars) -> tuple[Any, dict[str, Any]]:
        """The scalar table, a row for each tensor of the bucket, and the new values of scalar states, in one launch."""
        count, program, address = len(self._params), self._program, self._memory.address
        with used(self._memory):
            table = self._memory.zeros(count, len(program.columns))
            new = {s.buffer: self._memory.empty(count) for s in program.scalars.stores}
            if has_scalars(program):
                read = [a.array(known) for a in arguments(scalar_leaves(program))]
                arrays = map(address, (*read, *new.values()))
                narrow = int(known.counts.itemsize == 4)
                inputs = (count, address(known.counts), narrow, address(known.groups), address(known.hyper))
                groups = int(known.hyper.shape[1])
                self._launch("scalars", -(-count // self._threads), (*inputs, groups, *arrays, address(table)))
        return table, new


def _count(array: Any) -> int:
    """The number of elements of a CuPy array or a PyTorch tensor."""
    return int(array.numel() if hasattr(array, "numel") else array.size)


class DeviceTable:
    """A table that does not change; `at` is its address."""

    def __init__(self, content: Whole, ring: Ring, stream: Any) -> None:
        self.count = len(content)
        self._array = ring.device.memory(content.size)
        self.at = int(self._array.data.ptr)
        if content.size:
            ring.copy(self._array, content.reshape(-1), stream, bool(stream.is_capturing()))


class GivenTable:
    """The table of a call: `GIVEN` words and addresses for each tensor, and then the scalar table, if it is NumPy's.

    It goes to the device in one copy, and only when changed.
    """

    def __init__(self, tensors: int, lines: int, uploads: Uploads) -> None:
        self._table, self._uploads = CallArguments(tensors, len(GIVEN) + lines), uploads

    @property
    def words(self) -> Whole:
        """A row for each tensor."""
        return self._table.words

    def fill(self, work: Work, low: Whole, rows: Rows, fired: tuple[int, ...] | None, narrow: bool) -> bool:
        """Writes each tensor's row, and the truth that all its arrays in a stage begin at multiples of 16 bytes.

        `low` has, for each tensor, the bitwise or of its fixed addresses. If there are `narrow` kernels, and a
        gradient begins elsewhere, the truth is of the other arrays. Whether this is so.
        """
        words = self.words
        words[:, 0] = rows.index
        odd = narrow and work.gradient is not None and self._is_odd(work.gradient, fired)
        columns = [len(GIVEN) + column for column in work.per_call if not odd or column != work.gradient]
        bits = low | np.bitwise_or.reduce(words[:, np.array(columns, np.int64)], axis=1)
        words[:, 1] = work.even & (bits % PACK == 0)
        return odd

    def _is_odd(self, gradient: int, fired: tuple[int, ...] | None) -> bool:
        """Whether a gradient of these tensors begins at no multiple of 16 bytes."""
        addresses = self.words[slice(None) if fired is None else list(fired), len(GIVEN) + gradient]
        return bool(np.bitwise_or.reduce(addresses, initial=0) % PACK)

    def send(self, rows: Rows, memory: Memory, stream: Any) -> tuple[int, int]:
        """Copies the table to the device if changed. The addresses there of the table and of the scalar table."""
        sent = self._uploads.put(self._table.with_scalars(rows.table), stream, stream.ptr, bool(stream.is_capturing()))
        at = int(sent.data.ptr)
        host = type(rows.table) is np.ndarray
        return at, at + 8 * self._table.count if host else memory.address(rows.table)
