"""A kernel bound to tensors: what a step asks of it, in as few steps of Python as can be."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rulec.backend.protocol import Rows, Scalars, Scratch, Written
from rulec.compiler.ir import Program
from rulec.compiler.layout import Layout, kernel_buffers
from rulec.compiler.view import MatrixView
from rulec.errors import InternalError

from .cut import Whole
from .scalars import LANES, has_scalars, scalar_inputs
from .work import StageWork


class TritonCall:
    """A kernel bound to the parameters and states of one bucket, all on one device.

    What a stage reduces to holds until its next run.
    """

    work_kind = StageWork

    def __init__(
        self, program: Program, layout: Layout, kernels: Mapping[str, Any], params: Sequence[Any],
        states: Sequence[dict[str, Any]], views: Sequence[MatrixView],
    ) -> None:  # fmt: skip
        import torch

        self._program, self._kernels = program, kernels
        self._params, self._states = params, states
        self._device = params[0].device if params else torch.device("cpu")
        self._address = torch.Tensor.data_ptr
        sizes = [p.numel() for p in params]
        fixed = {b.name: b.role for b in kernel_buffers(program) if b.role in ("param", "state")}
        addresses = {
            name: [*map(self._address, params if role == "param" else [s[name] for s in states])]
            for name, role in fixed.items()
        }
        with self._on(None):
            self._works = [
                self.work_kind(program, layout, i, kernels, sizes, views, addresses, self._device)
                if stage.roots and params else None
                for i, stage in enumerate(program.stages)
            ]  # fmt: skip
        self._gradients: Whole = np.zeros(len(params), np.int64)
        self._last: tuple[int, tuple[int, ...] | None] = (0, None)
        self._first: Callable[[], Any] = _nothing

    def __call__(
        self, stage: int, moving: Sequence[Any], rows: Rows, scratch: Scratch | None = None, *,
        tensors: Sequence[int] | None = None, stream: Any = None,
    ) -> Written:  # fmt: skip
        """Runs a stage over every tensor of the bucket, or `tensors` of it, in place.

        On `stream` (torch's), by default the device's current one. A list of gradients that is given to several
        stages, one after the other, is not changed between them.
        """
        work = self._works[stage]
        if work is None:
            return Written(self._params, self._states)
        fired = None if tensors is None else tuple(tensors)
        words = self._words(work, stage, moving, rows, scratch or {}, fired)
        with self._on(stream):
            capturing = self._capturing()
            given = work.uploads.put(words, capturing)
            lines = len(self._params) * (1 + len(work.moving))
            table = rows.table if not isinstance(rows.table, np.ndarray) else _floats(given[lines:])
            launch = work.launch(fired, capturing)
            work.run(launch, given, table, _bytes(rows.stays), rows.scale)
        return Written(self._params, self._states, launch.reduced)

    def scalars(self, known: Scalars) -> tuple[Any, dict[str, Any]]:
        """The table, a row for each tensor of the bucket, and the new values of the scalar states, on the device."""
        import torch

        program, count = self._program, len(self._params)
        stores = program.scalars.stores
        if not has_scalars(program):
            return torch.zeros((count, len(program.columns)), dtype=torch.float64, device=self._device), {}
        inputs = scalar_inputs(program)
        given = [known.facts[f] for f in inputs.facts] + [known.states[s] for s in inputs.states]
        levels = [known.levels[level] for level in inputs.levels]
        with self._on(None):
            table = torch.empty((count, len(program.columns)), dtype=torch.float64, device=self._device)
            new = torch.empty((len(stores), count), dtype=torch.float64, device=self._device)
            self._kernels["scalars"][(-(-count // LANES),)](
                known.counts, known.groups, known.hyper, *given, *levels, table, new, count, known.hyper.shape[-1],
                LANES=LANES, enable_fp_fusion=False,
            )  # fmt: skip
        return table, {s.buffer: value for s, value in zip(stores, new, strict=True)}

    def _words(
        self, work: StageWork, stage: int, moving: Sequence[Any], rows: Rows, scratch: Scratch,
        fired: tuple[int, ...] | None,
    ) -> Whole:  # fmt: skip
        """The table `moving`, and behind it the scalar table, where it is NumPy's."""
        count, columns = len(self._params), 1 + len(work.moving)
        lines = count * columns
        host = isinstance(rows.table, np.ndarray)
        length = lines + (rows.table.size if host else 0)
        if len(work.words) != length:
            work.words = np.zeros(length, np.int64)
        table = work.words[:lines].reshape(count, columns)
        table[:, 0] = rows.index
        at = slice(None) if fired is None else list(fired)
        for column, name in enumerate(work.moving, 1):
            if name == "g":
                self._read_gradients(stage, moving, fired)
                table[:, column] = self._gradients
            else:
                table[at, column] = self._addresses(name, scratch.get(name, ()), count if fired is None else len(fired))
        if host:
            work.words[lines:] = rows.table.reshape(-1).view(np.int64)
        return work.words

    def _read_gradients(self, stage: int, moving: Sequence[Any], fired: tuple[int, ...] | None) -> None:
        # The stages of a step are called with one list of gradients: its addresses are read at the first.
        if stage and self._last == (id(moving), fired) and self._first() is next(iter(moving), None):
            return
        at = slice(None) if fired is None else list(fired)
        self._gradients[at] = self._addresses("g", moving, len(self._params) if fired is None else len(fired))
        self._last = (id(moving), fired)
        # Not the list itself: a step that ends early must not keep its gradients in memory.
        self._first = weakref.ref(moving[0]) if moving else _nothing

    def _addresses(self, name: str, arrays: Sequence[Any], count: int) -> list[int]:
        if len(arrays) != count or (count and arrays[0].device != self._device):
            found = f"{len(arrays)}, the first on {arrays[0].device}" if len(arrays) else "none"
            raise InternalError(
                f"the triton kernel needs {count} arrays of {name!r} on {self._device}: there are {found}"
            )
        return [*map(self._address, arrays)]

    # The device

    def _on(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        """The context in which the bucket's device, and the stream where one is given, are current."""
        import torch

        if self._device.type == "cpu":
            return np.errstate(all="ignore")
        if stream is not None:
            return torch.cuda.stream(stream)
        if torch.cuda.current_device() == self._device.index:
            return contextlib.nullcontext()
        return torch.cuda.device(self._device)

    def _capturing(self) -> bool:
        """Whether a CUDA graph is being captured."""
        if self._device.type == "cpu":
            return False
        import torch

        return torch.cuda.is_current_stream_capturing()


def _nothing() -> None:
    """What is left of gradients where there were none."""


def _floats(words: Any) -> Any:
    import torch

    return words.view(torch.float64)


def _bytes(truth: Any) -> Any:
    """Truth as bytes, which is how kernels load it."""
    import torch

    return None if truth is None else truth.view(torch.uint8)
