"""Runs a kernel on one job with several threads.

A kernel takes spans of work from its job until none is left, so any number of threads may run a job, and a late thread
does no harm. If PyTorch has loaded an OpenMP library, its threads run the job: they are awake after a backward pass,
and no second set competes with them. Otherwise Python threads wait for jobs in a queue, and run them without the global
lock.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue

from rulec.environment import whole_number
from rulec.kernel.multi_tensor.chunks import Policy

#: Positions in a job, in 64-bit words. The two words written by threads have separate cache lines.
NEXT_SPAN, ACTIVE = 0, 8
SPANS, SPAN_TABLE, CHUNK_TABLE, POINTERS, TENSORS, ROW_INDEX, ROWS, STAGE = range(16, 24)

Job = ctypes.c_int64 * 24

#: With fewer spans than this, waking Python threads costs more than they save.
_FEW_SPANS = 8

#: Spans for each thread, where there is work enough.
SPANS_PER_THREAD = 32

_Run = Callable[[int], None]
_Work = tuple[_Run, "ctypes.Array[ctypes.c_int64]"]


def run(kernel: _Run, address: int, job: ctypes.Array[ctypes.c_int64]) -> None:
    """Runs the kernel until the job is done and no thread is in it. `address` is of the kernel's C function."""
    spans = job[SPANS]
    if spans > 1:
        openmp = _openmp("torch" in sys.modules)
        if openmp is not None:
            # Always the same number of threads: a team that changes its size ends some threads and starts others.
            openmp(address, ctypes.addressof(job), asked_for(), 0)
            return
        if spans >= _FEW_SPANS and thread_count() > 1:
            _team().run(kernel, job, min(spans, thread_count()))
            return
    kernel(ctypes.addressof(job))


#: The most threads that RULEC_NUM_THREADS may ask for.
MOST_THREADS = 4096


@functools.cache
def asked_for() -> int:
    """RULEC_NUM_THREADS; 0 where it is not set. RulecError where it is no number of threads."""
    return whole_number("RULEC_NUM_THREADS", f"a number of threads, {MOST_THREADS} at most", MOST_THREADS)


@functools.cache
def thread_count() -> int:
    """The number of Python threads for a kernel: RULEC_NUM_THREADS, else the processors of this process."""
    if asked_for():
        return asked_for()
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


#: The division of a bucket's work into spans.
POLICY = Policy(spans=lambda: SPANS_PER_THREAD * thread_count())


@functools.cache
def _openmp(torch_is_loaded: bool) -> Callable[[int, int, int, int], None] | None:
    """`GOMP_parallel(function, argument, threads, flags)` of PyTorch's OpenMP; 0 threads mean its own number.

    None without PyTorch, with another OpenMP, or in a forked process: GNU's OpenMP does not survive a fork.
    """
    if not torch_is_loaded or _FORKED or not sys.platform.startswith("linux"):
        return None
    for name in _loaded_openmp():
        try:
            # This finds a loaded library, and loads none.
            parallel = ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_NOW).GOMP_parallel
        except (OSError, AttributeError):
            continue
        parallel.argtypes = [ctypes.c_size_t, ctypes.c_size_t, ctypes.c_uint, ctypes.c_uint]
        parallel.restype = None
        return parallel
    return None


def leave_cores(count: int) -> None:
    """Has the kernels that this thread runs use so many threads less, one at least.

    RULEC_NUM_THREADS stands; so does the number of Python threads, which all threads of the process share.
    """
    parallel = _openmp("torch" in sys.modules)
    if parallel is None or asked_for():
        return
    for name in _loaded_openmp():
        with contextlib.suppress(OSError, AttributeError):
            library = ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
            now = min(library.omp_get_max_threads(), len(os.sched_getaffinity(0)))
            library.omp_set_num_threads(max(1, now - count))
            return


def _loaded_openmp() -> list[str]:
    """The GNU OpenMP libraries mapped in this process, PyTorch's first: its wheels rename the file."""
    home = str(Path(getattr(sys.modules["torch"], "__file__", None) or "torch").parent)
    mapped = {line.split(maxsplit=5)[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/" in line}
    paths = sorted(path for path in mapped if Path(path).name.startswith("libgomp"))
    return [*(p for p in paths if p.startswith(home)), "libgomp.so.1"]


class _Team:
    """Python threads that wait for jobs; the caller of `run` works with them."""

    def __init__(self, helpers: int) -> None:
        self._work: SimpleQueue[_Work] = SimpleQueue()
        for index in range(helpers):
            threading.Thread(target=self._help, name=f"rulec-{index}", daemon=True).start()

    def _help(self) -> None:
        while True:
            kernel, job = self._work.get()
            kernel(ctypes.addressof(job))
            del job

    def run(self, kernel: _Run, job: ctypes.Array[ctypes.c_int64], threads: int) -> None:
        for _ in range(threads - 1):
            self._work.put((kernel, job))
        try:
            kernel(ctypes.addressof(job))
        finally:  # every span is taken; a helper may still be at its last one
            while job[ACTIVE]:
                time.sleep(0)


_FORKED: list[int] = []


@functools.cache
def _team() -> _Team:
    return _Team(thread_count() - 1)


def _forget_threads() -> None:
    """A forked child has none of its parent's threads."""
    _FORKED.append(os.getpid())
    _openmp.cache_clear()
    _team.cache_clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_threads)
