"""A stand-in for CuPy that runs CUDA C on the CPU: the few calls that the backend makes, on memory of NumPy's.

Copies to the device and launches wait in a queue until something looks at memory, as they would on a GPU: what is
overwritten too early shows. Kernels are the printed text as it is, compiled by g++ behind `cuda_on_cpu.h`; those of
blocks in descending order must give the same bits.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import hashlib
import importlib.machinery
import math
import os
import re
import shutil
import subprocess
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock

HERE = Path(__file__).parent

#: Why nothing can run here; empty where it can.
MISSING = "" if shutil.which("g++") else "there is no g++"

#: What is to be done before memory is looked at.
_QUEUE: list[Callable[[], None]] = []

#: Bytes around every array, and what they must keep.
_GUARD, _MARK = 64, 0xA5

#: The memory of arrays, and where they begin and end in it.
_MEMORY: list[tuple[np.ndarray[Any, Any], int, int]] = []

#: The arrays that a kernel which waits may read.
_ARRAYS: list[np.ndarray[Any, Any]] = []

#: How many know of memory that is only held there: the list's entry, and who asks.
_UNUSED = 2


def _run(more: Callable[[], Any]) -> None:
    """Does what is waiting, in order, as long as `more` says."""
    collects = gc.isenabled()
    gc.disable()  # what is collected may wait for an event, and so do what comes later before what is being done
    try:
        while more():
            _QUEUE.pop(0)()
    finally:
        if collects:
            gc.enable()


def flush() -> None:
    """Does what is waiting; AssertionError where a kernel wrote around an array instead of into it."""
    if not _QUEUE:
        return
    _run(lambda: _QUEUE)
    for raw, first, last in _MEMORY:
        assert raw[first - _GUARD : first].tobytes() == raw[last : last + _GUARD].tobytes() == bytes([_MARK] * _GUARD)
    # What nobody has any more was in use by what was waiting until now.
    _MEMORY[:] = [held for held in _MEMORY if sys.getrefcount(held[0]) > _UNUSED]
    _ARRAYS[:] = [held for held in _ARRAYS if sys.getrefcount(held) > _UNUSED + 1]


class Array(np.ndarray[Any, Any]):
    """A CuPy array: NumPy's do not mix with it, and a number is an array without dimensions."""

    def __array_finalize__(self, source: Any) -> None:
        _ARRAYS.append(self)

    @property
    def data(self) -> Any:  # type: ignore[override]
        return types.SimpleNamespace(ptr=int(self.__array_interface__["data"][0]))

    @property
    def device(self) -> Any:  # type: ignore[override]
        return types.SimpleNamespace(id=DEVICES.get(id(self), 0))

    def get(self) -> np.ndarray[Any, Any]:
        flush()
        return np.array(self.view(np.ndarray))

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **keywords: Any) -> Any:
        return _wrapped(getattr(ufunc, method))(*inputs, **keywords)

    def __array_function__(self, function: Any, kinds: Any, inputs: Any, keywords: Any) -> Any:
        return _wrapped(function)(*inputs, **keywords)

    def __getitem__(self, key: Any) -> Any:
        flush()
        return _taken(np.ndarray.__getitem__(self.view(np.ndarray), _given(key)))

    def __setitem__(self, key: Any, value: Any) -> None:
        flush()
        np.ndarray.__setitem__(self.view(np.ndarray), _given(key), _given(value))


#: The device of arrays that are said not to be on the first, by their id.
DEVICES: dict[int, int] = {}


def _given(value: Any) -> Any:
    """What NumPy is to be given for an argument; TypeError for an array of NumPy's, as CuPy raises it."""
    if isinstance(value, Array):
        return value.view(np.ndarray)
    if isinstance(value, np.ndarray) and value.ndim:
        raise TypeError("Unsupported type <class 'numpy.ndarray'>")
    if isinstance(value, list | tuple):
        return type(value)(map(_given, value))
    return value


def _taken(value: Any) -> Any:
    """A result of NumPy's as CuPy has it."""
    if isinstance(value, np.ndarray):
        return value.view(Array)
    if isinstance(value, np.generic):
        return _taken(np.asarray(value))
    if isinstance(value, list | tuple):
        return [*map(_taken, value)] if isinstance(value, list) else tuple(map(_taken, value))
    return value


def _wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*inputs: Any, **keywords: Any) -> Any:
        flush()
        return _taken(function(*_given(inputs), **{k: _given(v) for k, v in keywords.items()}))

    return call


# Memory


def empty(shape: Any, dtype: Any = np.float64, order: str = "C") -> Array:
    """Uninitialised memory between guards."""
    assert not Stream.capturing
    dtype = np.dtype(dtype)
    size = int(np.prod(shape)) * dtype.itemsize
    raw = np.full(size + 2 * _GUARD + 512, _MARK, np.uint8)
    start = _GUARD + -(raw.ctypes.data + _GUARD) % 512
    _MEMORY.append((raw, start, start + size))
    found = raw[start : start + size].view(dtype).reshape(shape, order=order)
    return found.view(Array)


def zeros(shape: Any, dtype: Any = np.float64, order: str = "C") -> Array:
    flush()
    found = empty(shape, dtype, order)
    found.view(np.ndarray).fill(0)
    return found


def asarray(values: Any, dtype: Any = None, order: str = "K") -> Array:
    """The array, or a copy of NumPy's on the device."""
    if isinstance(values, Array):
        return values if dtype in (None, values.dtype) else _taken(values.view(np.ndarray).astype(dtype))
    host = np.asarray(values, dtype)
    fortran = host.flags.f_contiguous and not host.flags.c_contiguous
    found = empty(host.shape, host.dtype, "F" if fortran else "C")
    found.view(np.ndarray)[...] = host
    return found


def _pinned(size: int) -> Any:
    """Memory that a device copies from."""
    assert not Stream.capturing
    kind: Any = type("PinnedMemoryPointer", (ctypes.c_ubyte * max(1, size),), {"ptr": property(ctypes.addressof)})
    return kind()


class Stream:
    """A stream; `capturing` where a graph is being captured."""

    capturing = False

    def __init__(self, ptr: int = 0) -> None:
        self.ptr = ptr

    def __enter__(self) -> Stream:
        _STREAMS.append(self)
        return self

    def __exit__(self, *problem: object) -> None:
        _STREAMS.pop()

    def is_capturing(self) -> bool:
        return self.capturing

    def synchronize(self) -> None:
        assert not self.capturing
        flush()

    @staticmethod
    def from_external(stream: Any) -> Stream:
        return Stream(stream.__cuda_stream__()[1])


_STREAMS = [Stream()]


class Graph:
    """What was captured, to be run any number of times."""

    def __init__(self) -> None:
        self.actions: list[Callable[[], None]] = []

    def replay(self) -> None:
        _QUEUE.extend(self.actions)


@contextmanager
def captured(monkeypatch: Any) -> Iterator[Graph]:
    """Captures what is launched and copied inside, and does not do it."""
    flush()
    graph = Graph()
    with monkeypatch.context() as patch:
        patch.setattr(Stream, "capturing", True)
        yield graph
    graph.actions, _QUEUE[:] = _QUEUE[:], []


class Event:
    """An event that was recorded before whatever is waiting now, or after it."""

    def __init__(self, disable_timing: bool = False) -> None:
        assert disable_timing
        self.pending = False

    def record(self, stream: Stream) -> None:
        assert not Stream.capturing
        self.pending = True
        _QUEUE.append(self._happen)

    def _happen(self) -> None:
        self.pending = False

    @property
    def done(self) -> bool:
        assert not Stream.capturing
        return not self.pending

    def synchronize(self) -> None:
        assert not Stream.capturing
        _run(lambda: self.pending)


class Device:
    """A GPU."""

    compute_capability = "90"

    def __init__(self, number: int = 0) -> None:
        self.id = number

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *problem: object) -> None:
        pass


def memcpy_async(target: int, source: int, size: int, kind: int, stream: int) -> None:
    """A copy that is made when the queue comes to it."""
    assert kind == 1
    _QUEUE.append(lambda: ctypes.memmove(target, source, size) and None)


# Kernels


class OutOfMemory(MemoryError):
    """What the stand-in raises where a GPU would have no memory."""


class Failure(Exception):
    """What the stand-in raises where CuPy's compiler would."""


def compile_using_nvrtc(source: str, options: tuple[str, ...]) -> tuple[bytes, None]:
    """What NVRTC makes of a source text: here the text itself, once it compiles."""
    _library(source)
    return source.encode(), None


class Module:
    """Kernels on the device."""

    def load(self, image: bytes) -> None:
        self._library = _library(image.decode())

    def get_function(self, name: str) -> Callable[..., None]:
        run = ctypes.cast(getattr(self._library, f"cuda_run_{name}"), ctypes.c_void_p)

        def launch(grid: tuple[int], block: tuple[int], arguments: tuple[int, ...]) -> None:
            assert all(type(x) is int for x in (*grid, *block, *arguments))
            _QUEUE.append(lambda: _launch(run, grid[0], block[0], arguments))

        return launch


COMPILER = types.SimpleNamespace(compile_using_nvrtc=compile_using_nvrtc)

#: Whether blocks and threads run in descending order.
backwards = False


def _launch(run: Any, grid: int, block: int, arguments: Sequence[int]) -> None:
    words = (ctypes.c_int64 * len(arguments))(*arguments)
    at = ctypes.addressof(words)
    pointers = (ctypes.c_void_p * len(arguments))(*(at + 8 * i for i in range(len(arguments))))
    _machine().cuda_launch(run, pointers, grid, block, int(backwards))


#: Nothing is contracted, and a kernel's functions are its own: C's library has a `step` too.
_OPTIONS = ("-std=c++17", "-shared", "-fPIC", "-ffp-contract=off", "-fno-gnu-unique", "-Wl,-Bsymbolic")


def _compiled(code: str, name: str, *options: str) -> Path:
    """The library of a text of C++, from the folder that tests/conftest.py names where it was made before."""
    return kept(
        f"{name}.so", (code, _header(), version("g++"), *_OPTIONS, *options), lambda at: _compile(code, at, options)
    )


def kept(name: str, parts: Sequence[str], make: Callable[[Path], None]) -> Path:
    """The file `name` that all of `parts` decide, made by `make(path)` where the checkout has none yet."""
    folder = Path(os.environ["RULEC_TESTS_COMPILED"]) / hashlib.sha256("\0".join(parts).encode()).hexdigest()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    file = folder / name
    with FileLock(f"{folder}.lock"):
        if not file.exists():
            make(file.with_suffix(".part"))
            file.with_suffix(".part").replace(file)
    return file


def _compile(code: str, library: Path, options: Sequence[str]) -> None:
    source = library.with_suffix(".cpp")
    source.write_text(code)
    command = ["g++", *_OPTIONS, *options, f"-I{HERE}", str(source), "-o", str(library)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Failure(done.stderr)


@functools.cache
def _header() -> str:
    return (HERE / "cuda_on_cpu.h").read_text()


@functools.cache
def version(compiler: str) -> str:
    return subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout


@functools.cache
def _machine() -> Any:
    """What runs the blocks of a grid."""
    library = _compiled((HERE / "cuda_on_cpu.cpp").read_text(), "machine", "-O2")
    return ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


@functools.cache
def _library(code: str) -> Any:
    """The kernels of a source text, as functions of this process."""
    _machine()
    names = re.findall(r'^extern "C" __global__ void __launch_bounds__\([\d, ]+\) (\w+)\(', code, re.M)
    text = "\n".join(['#include "cuda_on_cpu.h"', code, *(f"CUDA_KERNEL({name})" for name in names), ""])
    return ctypes.CDLL(str(_compiled(text, "kernel", "-O1", "-w")))


def _module() -> types.ModuleType:
    """The module `cupy`."""
    found = types.ModuleType("cupy")
    found.__spec__ = importlib.machinery.ModuleSpec("cupy", None)
    runtime = types.SimpleNamespace(
        is_hip=False, getDeviceCount=lambda: 1, memcpyHostToDevice=1, memcpyAsync=memcpy_async
    )
    memory = types.SimpleNamespace(OutOfMemoryError=OutOfMemory)
    cuda = types.SimpleNamespace(
        memory=memory, Device=Device, Event=Event, Stream=Stream, alloc_pinned_memory=_pinned, runtime=runtime,
        get_current_stream=lambda: _STREAMS[-1], nvrtc=types.SimpleNamespace(getVersion=lambda: (13, 0)),
        compiler=COMPILER, function=types.SimpleNamespace(Module=Module),
    )  # fmt: skip
    linalg = types.SimpleNamespace(**{n: _wrapped(getattr(np.linalg, n)) for n in ("qr", "eigh", "solve", "svd")})
    own = {
        "__version__": "14.0.0", "ndarray": Array, "linalg": linalg, "empty": empty, "zeros": zeros,
        "asarray": asarray, "cuda": cuda,
    }  # fmt: skip
    for name, value in own.items():
        setattr(found, name, value)
    found.__getattr__ = lambda name: _numpy(name)  # type: ignore[method-assign]
    return found


def _special() -> types.ModuleType:
    """The module `cupyx.scipy.special`."""
    found = types.ModuleType("cupyx.scipy.special")
    erf = np.vectorize(math.erf, otypes=[np.float64])
    found.erf = _wrapped(lambda x: erf(x).astype(x.dtype))  # type: ignore[attr-defined]
    return found


def _numpy(name: str) -> Any:
    found = getattr(np, name)
    return _wrapped(found) if callable(found) and not isinstance(found, type) else found


CUPY = _module()


@contextmanager
def installed() -> Iterator[types.ModuleType]:
    """The stand-in as the module `cupy`."""
    own = {"cupy": CUPY, "cupyx.scipy.special": _special()}
    before = {name: sys.modules.get(name) for name in own}
    sys.modules.update(own)
    try:
        yield CUPY
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module
