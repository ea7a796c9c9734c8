"""Who works on the host while a device goes on with its backward pass: a thread of its own.

The thread leaves a core to the thread that launches the device's kernels, and runs on the cores near the device, where
Linux knows them. Parameters in host memory have their backward pass on the same cores: there the work is done at once.
"""

from __future__ import annotations

import importlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

#: Where Linux describes the devices of the machine.
_DEVICES = Path("/sys/bus/pci/devices")


class Worker(ABC):
    """Does one piece of work after the other.

    `failed` says that some of it raised an error, until `stop`: the work after it has nothing to do.
    """

    failed = False

    @abstractmethod
    def give(self, work: Callable[[], None]) -> None:
        """Gives it work; returns at once, or after the work."""

    @abstractmethod
    def check(self) -> None:
        """Raises the error of work that failed so far."""

    @abstractmethod
    def wait(self) -> None:
        """Returns when all work is done; raises the error of work that failed."""

    @abstractmethod
    def stop(self) -> None:
        """Drops the work that has not begun, and returns when the rest is done; errors are dropped too."""


class InlineWorker(Worker):
    """Does the work in the thread that gives it."""

    def give(self, work: Callable[[], None]) -> None:
        work()

    def check(self) -> None:
        """Does nothing: who gave the work has its error."""

    def wait(self) -> None:
        """Does nothing: all work is done."""

    def stop(self) -> None:
        """Does nothing: all work is done."""


class ThreadWorker(Worker):
    """Does the work in a thread of its own, which is `prepared` first."""

    def __init__(self, prepared: Callable[[], None]) -> None:
        self._pool = ThreadPoolExecutor(1, "rulec-host", prepared)
        self._futures: list[Future[None]] = []

    def give(self, work: Callable[[], None]) -> None:
        self._futures = [each for each in self._futures if not each.done() or each.cancelled() or each.exception()]
        self._futures.append(self._pool.submit(self._do, work))

    def _do(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException:
            self.failed = True
            raise

    def check(self) -> None:
        if self.failed:
            self.wait()

    def wait(self) -> None:
        futures = [*self._futures]
        for each in futures:
            each.result()
        self._futures = []

    def stop(self) -> None:
        for each in self._futures:
            each.cancel()
        for each in self._futures:
            if not each.cancelled():
                each.exception()
        self._futures, self.failed = [], False


def worker_for(devices: Iterable[torch.device]) -> Worker:
    """Who works on the host for parameters on these devices."""
    devices = [*devices]
    if all(device.type == "cpu" for device in devices):
        return InlineWorker()
    return ThreadWorker(lambda: _prepare(devices))


def _prepare(devices: Iterable[torch.device]) -> None:
    """Binds this thread to the cores near the devices, but one, and to streams of its own."""
    for device in devices:
        if device.type == "cuda":
            streams: Any = torch.cuda.Stream
            # On the stream of the backward pass, copies would wait for kernels that it has queued.
            torch.cuda.set_stream(streams(device))
    with suppress(OSError):
        bind_to(set[int]().union(*(cores_near(pci_address(device)) for device in devices)))
    torch.get_num_threads()  # which sets the number of this thread, the first time
    importlib.import_module("rulec_backends.common.threads").leave_cores(1)


def bind_to(cores: set[int]) -> None:
    """Binds this thread and all threads started by it to these cores, as far as the process has them."""
    if hasattr(os, "sched_setaffinity"):
        allowed = cores & os.sched_getaffinity(0)
        if allowed:
            os.sched_setaffinity(0, allowed)


def pci_address(device: torch.device) -> str:
    """The address of a CUDA device as Linux writes it, as `0000:17:00.0`; empty where torch does not say."""
    if device.type != "cuda":
        return ""
    properties: Any = torch.cuda.get_device_properties(device)
    if not hasattr(properties, "pci_bus_id"):
        return ""
    domain, bus, slot = properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id
    return f"{domain:04x}:{bus:02x}:{slot:02x}.0"


def cores_near(address: str, devices: Path = _DEVICES) -> set[int]:
    """The cores of the NUMA node of a PCI device; empty where the machine has one node, or nobody knows."""
    folder = devices / address
    try:
        if not address or int((folder / "numa_node").read_text()) < 0:
            return set()
        return _cores((folder / "local_cpulist").read_text())
    except (OSError, ValueError):
        return set()


def _cores(text: str) -> set[int]:
    """The cores of a list as Linux writes it: `0-3,8`."""
    spans = [part.partition("-") for part in text.strip().split(",") if part]
    return {core for first, _, last in spans for core in range(int(first), int(last or first) + 1)}
