"""Arrays on a GPU, of CuPy and PyTorch: their addresses and streams, and new ones; and modules of kernels there."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from operator import attrgetter
from typing import Any

import numpy as np

from rulec.errors import BackendUnavailable, TensorError

from .nvrtc import loaded

#: The kernels of a module by name.
Functions = Callable[[str], Any]

#: The least compute capability, times 10: earlier GPUs have no instruction for rounding to bfloat16.
OLDEST = 80


class Memory:
    """CuPy arrays on one device. `address` gives the address of an array's first element."""

    def __init__(self, device: int) -> None:
        self.device = device
        self.address: Callable[[Any], int] = attrgetter("data.ptr")

    def empty(self, count: int) -> Any:
        """An uninitialised float64 array."""
        import cupy

        return cupy.empty(count, np.float64)

    def zeros(self, rows: int, columns: int) -> Any:
        """A float64 array of zeros."""
        import cupy

        return cupy.zeros((rows, columns), np.float64)

    def stream(self, chosen: Any) -> Any:
        """A stream as an object of CuPy; by default the library's current one. Its device must be current."""
        import cupy

        return cupy.cuda.get_current_stream() if chosen is None else _named(chosen)

    def memory(self, words: int) -> Any:
        """A CuPy array of 64-bit words, as the target of a copy."""
        import cupy

        return cupy.empty(max(1, words), np.int64)

    def pinned(self, words: int) -> _Piece:
        """Pinned memory of the host, as the source of a copy."""
        return _Piece(words)


class TorchMemory(Memory):
    """PyTorch's CUDA tensors."""

    def __init__(self, device: int) -> None:
        import torch

        super().__init__(device)
        self.address = torch.Tensor.data_ptr

    def empty(self, count: int) -> Any:
        import torch

        return torch.empty(count, dtype=torch.float64, device=f"cuda:{self.device}")

    def zeros(self, rows: int, columns: int) -> Any:
        import torch

        return torch.zeros((rows, columns), dtype=torch.float64, device=f"cuda:{self.device}")

    def stream(self, chosen: Any) -> Any:
        import torch

        return _named(torch.cuda.current_stream(self.device) if chosen is None else chosen)


def _named(stream: Any) -> Any:
    """A stream of CuPy or torch as an object of CuPy."""
    import cupy

    if not hasattr(stream, "cuda_stream"):
        return stream
    if hasattr(cupy.cuda.Stream, "from_external"):
        return cupy.cuda.Stream.from_external(_Foreign(stream.cuda_stream))
    return cupy.cuda.ExternalStream(stream.cuda_stream)


class _Foreign:
    """A stream of another library."""

    def __init__(self, pointer: int) -> None:
        self._pointer = pointer

    def __cuda_stream__(self) -> tuple[int, int]:
        """The version of the protocol, and the stream."""
        return 0, self._pointer


def memory_of(arrays: Sequence[Any], what: str) -> Memory:
    """The memory of all these arrays. TensorError where they are not on one GPU; `what` names them in the message."""
    places = {_where(array, what) for array in arrays}
    if len({library for library, _ in places}) > 1:
        raise TensorError(f"{what} are CuPy arrays and PyTorch tensors in one list: give arrays of one library")
    if len(places) > 1:
        devices = " and ".join(f"GPU {device}" for device in sorted(device for _, device in places))
        raise TensorError(f"{what} lie on {devices}: give those of each GPU to an optimizer of their own")
    library, device = places.pop()
    return TorchMemory(device) if library == "torch" else Memory(device)


def _where(array: Any, what: str) -> tuple[str, int]:
    """The library of an array, and the number of its GPU."""
    import cupy

    if isinstance(array, cupy.ndarray):
        _check_contiguous(array.flags.c_contiguous or array.flags.f_contiguous, what, "cupy.ascontiguousarray of it")
        return "cupy", int(array.device.id)
    if hasattr(array, "data_ptr") and hasattr(array, "is_cuda"):
        if array.is_cuda:
            return "torch", int(array.device.index or 0)
        kind, move = f"a PyTorch tensor on {array.device}", "tensor.cuda()"
    else:
        kind, move = f"a {type(array).__module__.split('.')[0]} array in main memory", "cupy.asarray(array)"
        if not isinstance(array, np.ndarray):
            kind = f"a {type(array).__name__}"
    raise TensorError(
        f"the cupy backend works on a GPU, and one of {what} is {kind}: pass {move}, or use backend 'cpu'"
    )


def _check_contiguous(contiguous: bool, what: str, advice: str) -> None:
    if not contiguous:
        raise TensorError(f"one of {what} is not contiguous: pass {advice}")


@contextmanager
def used(memory: Memory, chosen: Any = None) -> Iterator[Any]:
    """A context with the device and the stream as the current ones. It gives the stream."""
    import cupy

    with cupy.cuda.Device(memory.device):
        stream = memory.stream(chosen)
        with stream:
            yield stream


class _Piece:
    """Pinned memory, and the event after the last copy from it."""

    def __init__(self, words: int) -> None:
        import cupy

        self._memory = cupy.cuda.alloc_pinned_memory(8 * words)
        self.words: np.ndarray[Any, np.dtype[np.int64]] = np.frombuffer(self._memory, np.int64, words)
        self._copied = cupy.cuda.Event(disable_timing=True)

    def arrived(self) -> bool:
        """Whether the last copy has ended."""
        return bool(self._copied.done)

    def copy(self, target: Any, count: int, stream: Any, captured: bool) -> None:
        """Begins a copy to an array on the current device."""
        import cupy

        kind = cupy.cuda.runtime.memcpyHostToDevice
        cupy.cuda.runtime.memcpyAsync(int(target.data.ptr), self._memory.ptr, 8 * count, kind, stream.ptr)
        if not captured:
            self._copied.record(stream)

    def __del__(self) -> None:
        # CuPy would lend the memory to others during a copy.
        with suppress(Exception):
            self._copied.synchronize()


class Modules:
    """A source text, compiled for each device in use."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._functions: dict[int, Functions] = {}

    def functions(self, name: str, device: int) -> Functions:
        """The kernels by name on `device`, which must be the current device.

        BackendUnavailable where the GPU is too old or NVRTC fails, with the first line of NVRTC's error.
        """
        if device not in self._functions:
            _check_age(device)
            try:
                self._functions[device] = functools.cache(loaded(self._source).get_function)
            except Exception as error:
                raise BackendUnavailable(
                    f"NVRTC cannot compile the kernels of {name} ({first_line(error)}): check that CuPy and CUDA fit "
                    f"together with `python -c 'import cupy; cupy.show_config()'`, or use another backend"
                ) from error
        return self._functions[device]


@functools.lru_cache(maxsize=1024)
def modules_of(source: str) -> Modules:
    """The modules of a source text."""
    return Modules(source)


def _check_age(device: int) -> None:
    import cupy

    capability = str(cupy.cuda.Device(device).compute_capability)
    if int(capability) < OLDEST:
        raise BackendUnavailable(
            f"GPU {device} has compute capability {int(capability) / 10:.1f}, and the cupy backend needs "
            f"{OLDEST / 10:.1f} or later: use another backend"
        )


def first_line(error: Exception) -> str:
    """The first line with the word "error" in a message, else the first line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    first = next((line for line in lines if "error" in line.lower()), lines[0] if lines else type(error).__name__)
    return first.rstrip(".")
