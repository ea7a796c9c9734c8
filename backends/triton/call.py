"""A kernel bound to tensors: the calls of a step, in as little Python as possible."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rulec.array_api.slices import Together
from rulec.backend.protocol import Numbers, ReplayableCall, Rows, Scalars, Scratch
from rulec.compiler.ir import Program
from rulec.compiler.layout import Layout
from rulec.compiler.view import MatrixView
from rulec.errors import InternalError
from rulec.kernel.multi_tensor.address import addresses_of, array_address
from rulec.kernel.multi_tensor.call import AddressedCall
from rulec.kernel.multi_tensor.cut import Tensors, Whole
from rulec.kernel.multi_tensor.uploads import Ring
from rulec.kernel.place import bound_arrays

from ..common.scalars import has_scalars
from .coded import scales_of
from .memory import TorchDevice, current, floats, is_capturing, truth_bytes
from .scalars import LANES, scalar_arguments
from .work import StageWork


class TritonCall(AddressedCall[StageWork]):
    """A kernel bound to the parameters and states of one bucket, all on one device."""

    backend = "triton"
    work_kind = StageWork

    def __init__(
        self, program: Program, layout: Layout, kernels: Mapping[str, Any], params: Sequence[Any],
        states: Sequence[dict[str, Any]], views: Sequence[MatrixView],
        narrow: Callable[[], Mapping[str, Any]] | None = None,
    ) -> None:  # fmt: skip
        """`narrow` makes the kernels for gradients at any address beside aligned arrays."""
        import torch

        super().__init__(params, states)
        self._program, self._kernels = program, kernels
        self._device = params[0].device if params else torch.device("cpu")
        self._address = torch.Tensor.data_ptr
        tensors = Tensors(self.backend, program, layout, [p.numel() for p in params], views)
        bound = bound_arrays(program, params, states) | scales_of(layout, states)
        addresses = {name: [*map(self._address, arrays)] for name, arrays in bound.items()}
        self._ring = Ring(TorchDevice(self._device))
        with current(self._device, None):
            self._works = [
                self.work_kind(tensors, i, kernels, addresses, self._device, self._ring, narrow)
                if stage.roots and params
                else None
                for i, stage in enumerate(program.stages)
            ]

    def _run(
        self, work: StageWork, stage: int, moving: Sequence[Any], rows: Rows, scratch: Scratch,
        fired: tuple[int, ...] | None, stream: Any,
    ) -> Mapping[str, Any]:  # fmt: skip
        words = self._words(work, moving, rows, scratch, fired)
        with current(self._device, stream):
            capturing = is_capturing(self._device)
            on_device = work.uploads.put(words, stream, stream, capturing)
            table = floats(on_device[work.call_table.count :]) if type(rows.table) is np.ndarray else rows.table
            launch = work.launch(fired, capturing)
            table_of_fired = work.call_table.words if fired is None else work.call_table.words[list(fired)]
            odd = work.is_odd(table_of_fired, capturing)
            work.run(launch, on_device, table, truth_bytes(rows.stays), rows.scale, odd)
        return launch.reduced

    def standing(self, rows: Rows) -> ReplayableCall:
        """The call of the program's only stage over all tensors, to be run again with other rows and gradients."""
        (work,) = filter(None, self._works)
        return StandingCall(work, self._device, rows).standing

    def scalars(self, known: Scalars) -> tuple[Any, dict[str, Any]]:
        """The scalar table, a row for each tensor of the bucket, and the new scalar states by name, on the device."""
        import torch

        program, count = self._program, len(self._params)
        stores = program.scalars.stores
        if not has_scalars(program):
            return torch.zeros((count, len(program.columns)), dtype=torch.float64, device=self._device), {}
        arrays = [argument.array(known) for argument in scalar_arguments(program)]
        with current(self._device, None):
            table = torch.empty((count, len(program.columns)), dtype=torch.float64, device=self._device)
            new = torch.empty((len(stores), count), dtype=torch.float64, device=self._device)
            self._kernels["scalars"][(-(-count // LANES),)](
                known.counts, known.groups, known.hyper, *arrays, table, new, count, known.hyper.shape[-1],
                LANES=LANES, enable_fp_fusion=False,
            )  # fmt: skip
        return table, {s.buffer: value for s, value in zip(stores, new, strict=True)}

    def _words(
        self, work: StageWork, moving: Sequence[Any], rows: Rows, scratch: Scratch, fired: tuple[int, ...] | None
    ) -> Whole:
        """The table `moving`, and after it the scalar table, if it is NumPy's."""
        table = work.call_table.words
        table[:, 0] = rows.index
        if work.reads_gradients:
            table[:, 1] = self._read_gradients(moving, fired)
        at = slice(None) if fired is None else list(fired)
        for line in work.moving:
            arrays = line.take(scratch, self._everything if fired is None else fired)
            table[at, 1 + line.line] = self._addresses(arrays)
        return work.call_table.with_scalars(rows.table)

    def _addresses(self, moving: Sequence[Any]) -> Sequence[int]:
        """The addresses of these arrays; InternalError where the first is on another device."""
        first = next(iter(moving.memory if isinstance(moving, Together) else moving), None)
        if first is not None and first.device != self._device:
            raise InternalError(f"the triton kernel runs on {self._device} and was given arrays on {first.device}")
        return addresses_of(moving, self._address)  # type: ignore[no-any-return]


class StandingCall:
    """The call of one stage over all tensors of a bucket, whose words are written in place between its runs.

    The rows of several steps lie on the device. So a run copies the addresses of gradients where they are new,
    and is a launch alone where they are not.
    """

    def __init__(self, work: StageWork, device: Any, rows: Rows) -> None:
        self._work, self._device = work, device
        words = np.zeros_like(work.call_table.words)
        words[:, 0] = rows.index
        self._table, self._words = words, words.reshape(-1)
        self._row, self._next = ctypes.c_int64(), ctypes.c_int64()
        # A stage that reads no gradients has no column for their addresses: these go to memory that nobody reads.
        self._unread = np.zeros(0 if work.reads_gradients else len(rows.index), np.int64)
        first = array_address(words) + 8 if work.reads_gradients else array_address(self._unread)
        stride = words.strides[0] if work.reads_gradients else 8
        row, following = map(ctypes.addressof, (self._row, self._next))
        self.standing = ReplayableCall(self.run, self.renew, following, row, first, stride)

    def renew(self, ahead: Numbers) -> None:
        """Goes on with these rows; each of a rule without numbers is empty."""
        self._ahead, self._first, self._stride = ahead, array_address(ahead), ahead.strides[0]
        self._row.value = self._first - self._stride
        with current(self._device, None):
            self._tables = floats(self._work.rows_ahead(ahead)).view(len(ahead), ahead[0].size).unbind()

    def run(self) -> None:
        """One launch, with the gradients and the row of the scalar table of now."""
        work = self._work
        row = (self._row.value - self._first) // (self._stride or 1)  # without numbers all rows are at one address
        with current(self._device, None):
            there = work.uploads.put(self._words, None, None, False)
            work.run(
                work.everything,
                there,
                self._tables[row],
                None,
                None,
                work.is_odd(self._table, is_capturing(self._device)),
            )
