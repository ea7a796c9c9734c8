"""The thread that works on the host: its order, its errors, its cores and its threads."""

from __future__ import annotations

import _ctypes
import ctypes
import os
import sys
from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread, get_ident
from typing import Any

import pytest
import torch

import rulec.torch
from rulec.torch.offload import worker
from rulec.torch.offload.worker import InlineWorker, ThreadWorker, bind_to, cores_near, worker_for
from rulec_backends.common import threads
from rulec_backends.cpu import call
from tests.torch.offload.runs import parameters, take_steps


def test_work_is_done_in_order_and_beside() -> None:
    done: list[tuple[int, bool]] = []
    here, beside = get_ident(), ThreadWorker(lambda: None)
    for number in range(20):
        beside.give(lambda number=number: done.append((number, get_ident() == here)))  # type: ignore[misc]
    beside.wait()
    assert done == [(number, False) for number in range(20)]


def test_an_error_is_raised_until_the_worker_is_stopped() -> None:
    beside = ThreadWorker(lambda: None)

    def fail() -> None:
        raise ValueError("wrong")

    beside.give(fail)
    for act in (beside.wait, beside.check):
        with pytest.raises(ValueError, match="wrong"):
            act()
    assert beside.failed
    beside.stop()
    beside.check()
    beside.wait()
    assert not beside.failed


def test_a_stop_drops_what_has_not_begun() -> None:
    beside, begun, gate, done = ThreadWorker(lambda: None), Event(), Event(), list[int]()

    def first() -> None:
        begun.set()
        gate.wait()
        done.append(1)

    beside.give(first)
    beside.give(lambda: done.append(2))
    begun.wait()
    stopping = Thread(target=beside.stop)
    stopping.start()
    beside._futures[1].add_done_callback(lambda future: gate.set())
    stopping.join()
    assert done == [1]


def test_parameters_in_host_memory_have_no_second_thread() -> None:
    assert isinstance(worker_for([torch.device("cpu")]), InlineWorker)
    assert isinstance(worker_for([torch.device("cuda", 0)]), ThreadWorker)


@pytest.mark.parametrize(
    ("node", "cores", "expected"),
    [
        ("1", "4-7,12", {4, 5, 6, 7, 12}), ("0", "0", {0}), ("-1", "0-3", set()), ("", "0-3", set()),
        ("1", "all", set()), ("1", None, set()),
    ],
)  # fmt: skip
def test_the_cores_near_a_device(tmp_path: Path, node: str, cores: str | None, expected: set[int]) -> None:
    folder = tmp_path / "0000:17:00.0"
    folder.mkdir()
    (folder / "numa_node").write_text(f"{node}\n")
    if cores is not None:
        (folder / "local_cpulist").write_text(f"{cores}\n")
    assert cores_near("0000:17:00.0", tmp_path) == expected
    assert cores_near("0000:18:00.0", tmp_path) == cores_near("", tmp_path) == set()


def in_a_thread(work: Callable[[], Any]) -> Any:
    """What work returns in a new thread."""
    results: list[Any] = []
    thread = Thread(target=lambda: results.append(work()))
    thread.start()
    thread.join()
    return results[0]


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no binding of threads")
def test_a_thread_is_bound_and_others_are_not() -> None:
    before = os.sched_getaffinity(0)
    one = {min(before)}
    assert in_a_thread(lambda: (bind_to(one | {10**4}), os.sched_getaffinity(0))[1]) == one
    assert in_a_thread(lambda: (bind_to({10**4}), os.sched_getaffinity(0))[1]) == before
    assert os.sched_getaffinity(0) == before


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="GNU's OpenMP")
def test_the_worker_leaves_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    library = ctypes.CDLL(threads._loaded_openmp()[0], mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {*range(8)})
    monkeypatch.setattr(worker, "bind_to", lambda cores: library.omp_set_num_threads(5))

    def left(asked: int) -> int:
        monkeypatch.setattr(threads, "asked_for", lambda: asked)
        worker._prepare([])
        return int(library.omp_get_max_threads())

    monkeypatch.setattr(torch, "get_num_threads", lambda: None)
    here = library.omp_get_max_threads()
    assert in_a_thread(lambda: left(0)) == 4
    assert in_a_thread(lambda: left(3)) == 5, "RULEC_NUM_THREADS stands"
    assert library.omp_get_max_threads() == here


def test_kernels_run_without_the_lock_of_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """ctypes lets the lock go before a call of every function, except of those of Python's own interface."""
    run, flags = call.cpu_threads.run, list[int]()

    def looked_at(kernel: Any, *arguments: Any) -> None:
        flags.append(type(kernel)._flags_)
        run(kernel, *arguments)

    monkeypatch.setattr(call.cpu_threads, "run", looked_at)
    for rule in ("adamw", "adafactor"):
        params = parameters()
        take_steps(rulec.torch.optimizer(rule)(params, offload="step"), params, 1)
    assert len(flags) > 2
    assert not any(each & _ctypes.FUNCFLAG_PYTHONAPI for each in flags)
