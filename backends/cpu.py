"""The cpu backend: one kernel runs all tensors of a bucket in one call, over their memory as it lies.

A kernel reads addresses from a table (buffers x tensors), takes chunks of elements from a list, and updates each
element in one pass: every parameter, gradient and state is read once and what changes is written once. Chunks start at
each tensor's own start and have one length, so the bits of a result depend neither on the other tensors nor on threads.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.metadata
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rulec.backend import cache
from rulec.backend.layout import Layout, kernel_buffers
from rulec.backend.protocol import Rows, Written
from rulec.compiler.ir import Program
from rulec.compiler.view import MatrixView

from . import cpu_machine, cpu_threads
from .cpu_print import kernel_source, limit_source
from .cpu_threads import Job

_Table = np.ndarray[Any, np.dtype[np.int64]]

#: Elements in a chunk, the unit of the loop. A tensor's last chunk is shorter.
CHUNK = 32768
#: Spans for each thread, where there is work enough. A span is what a thread takes from a job at once: neighbouring
#: chunks, for starting to stream at a new place costs about a microsecond.
SPANS_PER_THREAD = 32
#: Elements in a span, at least: fewer are not worth taking.
SMALLEST_SPAN = 32768


class CpuBackend:
    """Kernels for tensors in main memory: NumPy arrays, and PyTorch tensors on the CPU."""

    name = "cpu"

    def unavailable_reason(self) -> str | None:
        """None: where Numba is not installed, the one line that says so."""
        missing = [package for package in ("numba", "llvmlite") if importlib.util.find_spec(package) is None]
        return f"{missing[0]} is not installed: pip install numba" if missing else None

    def emit(self, program: Program, layout: Layout) -> str:
        """The kernel's source. BackendUnsupported for a program that is not elementwise."""
        return kernel_source(program, layout)

    def build(self, program: Program, layout: Layout, source: str) -> CpuKernel:
        """The kernel of a source text: from the cache, or compiled into it."""
        return CpuKernel(program, layout, _machine(program.name, source))


def limit_kernel(program: Program, layout: Layout) -> CpuKernel:
    """A kernel that moves the same bytes as the program's own and computes nothing: the yardstick of `rulec bench`.

    Every number stays as it was.
    """
    return CpuKernel(program, layout, _machine(f"{program.name}_limit", limit_source(program, layout)))


@functools.lru_cache(maxsize=1024)
def _machine(name: str, source: str) -> cpu_machine.Machine:
    """The machine code of a source, loaded: from the cache where it is whole, else compiled under its lock."""
    key = cache.cache_key(source, *_facts())
    folder = cache.entry("cpu", key)
    file = folder / "kernel.o"
    found = _read(file)
    if found is None:
        with cache.locked(folder):
            found = _read(file)
            if found is None:
                cache.discard(folder)
                found = _compile(cache.source_file("cpu", key, f"{_file_name(name)}.py", source), source)
                cache.write_atomically(file, hashlib.sha256(found).digest() + found)
    return cpu_machine.Machine(found)


def _compile(path: Path, source: str) -> bytes:
    return cpu_machine.emit_object(cpu_machine.compile_text(source, path))


def _file_name(name: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in name.lower())[:60] or "kernel"


def _read(file: Path) -> bytes | None:
    """The object file behind its digest; None where it is missing or not what was written."""
    try:
        content = file.read_bytes()
    except OSError:
        return None
    digest, found = content[:32], content[32:]
    return found if hashlib.sha256(found).digest() == digest else None


@functools.cache
def _facts() -> tuple[str, ...]:
    """What machine code depends on beside the source: the compilers, the words' definitions, the processor."""
    here = Path(__file__).parent
    words = hashlib.sha256(b"".join(p.read_bytes() for p in sorted(here.glob("cpu_*.py"))))
    versions = [importlib.metadata.version(package) for package in ("numba", "llvmlite")]
    return (*versions, words.hexdigest(), cpu_machine.architecture())


class CpuKernel:
    """Compiled code for one program and layout."""

    def __init__(self, program: Program, layout: Layout, machine: cpu_machine.Machine) -> None:
        self.machine = machine
        self.buffers = [b.name for b in kernel_buffers(program)]
        self.layout = layout

    def bind(
        self, params: Sequence[Any], states: Sequence[dict[str, Any]], views: Sequence[MatrixView] = ()
    ) -> CpuCall:
        """A call over these tensors, whose addresses are read now.

        Parameters and states are NumPy arrays or PyTorch tensors, contiguous, of the layout's dtypes; none may overlap
        another, nor a gradient.
        """
        return CpuCall(self, params, states)


class CpuCall:
    """A kernel bound to the parameters and states of one bucket. One thread at a time may call it."""

    def __init__(self, kernel: CpuKernel, params: Sequence[Any], states: Sequence[dict[str, Any]]) -> None:
        self._machine = kernel.machine
        self._written = Written(params, states)
        self._address = _address_of(params)
        self._pointers = np.zeros((len(kernel.buffers), len(params)), np.int64)
        for line, name in zip(self._pointers, kernel.buffers, strict=True):
            if name != "g":
                line[:] = [self._address(x) for x in (params if name == "p" else [s[name] for s in states])]
        self._gradients = self._pointers[kernel.buffers.index("g")]
        self._chunks, first = _chunks([_elements(p) for p in params])
        self._first_chunk: list[int] = first.tolist()
        self._lengths: list[int] = (self._chunks[:, 2] - self._chunks[:, 1]).tolist()
        self._least = max(SMALLEST_SPAN, sum(self._lengths) // (SPANS_PER_THREAD * cpu_threads.thread_count()))
        self._spans = self._spans_of(range(len(params)))
        self._part: tuple[tuple[int, ...], _Table] = (tuple(range(len(params))), self._spans)
        self._tables = [_array_address(t) for t in (self._spans, self._chunks, self._pointers)]

    def __call__(
        self, stage: int, moving: Sequence[Any], rows: Rows, scratch: Any = None, *,
        tensors: Sequence[int] | None = None, stream: Any = None,
    ) -> Written:  # fmt: skip
        """Updates every tensor of the bucket, or `tensors` of it, in place; returns the bound params and states."""
        spans, (spans_at, chunks_at, pointers_at) = self._spans, self._tables
        if tensors is None:
            self._gradients[:] = [*map(self._address, moving)]
        else:
            self._gradients[list(tensors)] = [*map(self._address, moving)]
            if self._part[0] != (fired := tuple(tensors)):
                self._part = (fired, self._spans_of(fired))
            spans = self._part[1]
            spans_at = _array_address(spans)
        job = Job()
        job[cpu_threads.SPANS :] = [
            len(spans), spans_at, chunks_at, pointers_at,
            len(self._gradients), _array_address(rows.index), _array_address(rows.table), 0,
        ]  # fmt: skip
        cpu_threads.run(self._machine.run, self._machine.address, job)
        return self._written

    def _spans_of(self, tensors: Sequence[int]) -> _Table:
        """Rows (first chunk, last chunk + 1) over the chunks of these tensors."""
        spans: list[list[int]] = []
        held = self._least
        for tensor in tensors:
            for chunk in range(self._first_chunk[tensor], self._first_chunk[tensor + 1]):
                if held >= self._least or spans[-1][1] != chunk:
                    spans.append([chunk, chunk])
                    held = 0
                spans[-1][1] = chunk + 1
                held += self._lengths[chunk]
        return np.array(spans, np.int64).reshape(-1, 2)


def _elements(tensor: Any) -> int:
    """How many elements a NumPy array or a PyTorch tensor has."""
    return int(tensor.size if isinstance(tensor, np.ndarray) else tensor.numel())


def _chunks(lengths: Sequence[int]) -> tuple[_Table, _Table]:
    """The chunks of tensors of these lengths, as rows (tensor, start, stop), and where each tensor's begin."""
    length = np.asarray(lengths, np.int64)
    count = -(-length // CHUNK)
    first = np.concatenate([np.zeros(1, np.int64), np.cumsum(count)])
    tensor = np.repeat(np.arange(len(length)), count)
    start = (np.arange(first[-1]) - first[tensor]) * CHUNK
    return np.stack([tensor, start, np.minimum(start + CHUNK, length[tensor])], axis=1), first


def _address_of(tensors: Sequence[Any]) -> Callable[[Any], int]:
    """How to find the address of the first element of such tensors."""
    if tensors and not isinstance(tensors[0], np.ndarray):
        return type(tensors[0]).data_ptr  # type: ignore[no-any-return]
    return _array_address


def _slow_array_address(array: np.ndarray[Any, Any]) -> int:
    return int(array.__array_interface__["data"][0])


def _fast_array_address(array: np.ndarray[Any, Any]) -> int:
    """The same, six times as fast: NumPy's ABI has the address right behind the object's header."""
    return _WORD.from_address(id(array) + _HEADER).value


_WORD = ctypes.c_size_t
_HEADER = object.__basicsize__
_PROBE = np.zeros(3)[1:]
_ABI_IS_KNOWN = _fast_array_address(_PROBE) == _slow_array_address(_PROBE)
_array_address = _fast_array_address if _ABI_IS_KNOWN else _slow_array_address
