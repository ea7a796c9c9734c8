"""Processes for the parts: a kernel that spoils its context of the device spoils one process."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from benchmarks.gpu.device import Bench
from benchmarks.gpu.part import Part, sentence
from benchmarks.gpu.run import Ended, Message, Started

#: Seconds that a process is given to end by itself.
_GRACE = 5.0


@dataclass
class _Worker:
    process: Any
    connection: Connection


class Processes:
    """A crew of processes, each with a context of the device of its own."""

    def __init__(self, size: int, bench: Bench) -> None:
        self.size = size
        self._bench = bench
        self._context = multiprocessing.get_context("spawn")
        self._workers: dict[int, _Worker] = {}

    def give(self, worker: int, part: Part) -> None:
        """Sends the part to the process, after starting it where needed."""
        if worker not in self._workers:
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_begin, args=(theirs, self._bench), daemon=True)
            process.start()
            theirs.close()  # so that the end of the process shows as the end of what it sends
            self._workers[worker] = _Worker(process, ours)
        with contextlib.suppress(BrokenPipeError):  # it has died since its last part: `wait` sees that
            self._workers[worker].connection.send(part)

    def wait(self, seconds: float) -> Iterator[tuple[int, Message]]:
        """One message from each process with one; an `Ended` for a process that died silently."""
        owners = {one.connection: worker for worker, one in self._workers.items()}
        for connection in wait(list(owners), seconds):
            worker = owners[connection]  # type: ignore[index]
            try:
                message = self._workers[worker].connection.recv()
            except (EOFError, OSError):
                message = Ended(self._gone(worker))
            if isinstance(message, Ended) and not message.usable:
                self.end(worker)
            yield worker, message

    def _gone(self, worker: int) -> str:
        process = self._workers[worker].process
        process.join(_GRACE)
        code = process.exitcode
        self.end(worker)
        return f"its process was ended by signal {-code}" if code and code < 0 else f"its process ended with {code}"

    def end(self, worker: int) -> None:
        """Kills the process and its children: one that hangs on the device answers to nothing less."""
        one = self._workers.pop(worker)
        with contextlib.suppress(ProcessLookupError):  # it has ended, or has no group of its own yet
            os.killpg(one.process.pid, signal.SIGKILL)
        one.process.kill()
        one.process.join(_GRACE)
        one.connection.close()

    def close(self, first: int = 0) -> None:
        """Ends the processes from number `first` on: by themselves where they are idle, else by force."""
        leaving = [worker for worker in self._workers if worker >= first]
        for worker in leaving:
            with contextlib.suppress(BrokenPipeError):
                self._workers[worker].connection.send(None)
        until = time.monotonic() + _GRACE
        for worker in leaving:
            self._workers[worker].process.join(max(0.0, until - time.monotonic()))
            self.end(worker)


def _begin(connection: Connection, bench: Bench) -> None:
    """The main function of a process, which leads a group of its own.

    Prints of libraries go to stderr, because stdout may be for JSON alone. If a library crashes, the place goes to
    stderr too.
    """
    os.setsid()
    os.dup2(2, 1)
    faulthandler.enable()
    serve(connection, bench)


def serve(connection: Connection, bench: Bench) -> None:
    """Works on the parts that come, until there are no more or the device is of no use to this process any longer."""
    with contextlib.suppress(EOFError, BrokenPipeError, KeyboardInterrupt):
        while (part := connection.recv()) is not None:
            fault = _work(connection, bench, part)
            usable = bench.recover()
            connection.send(Ended(fault, usable))
            if not usable:
                return


def _work(connection: Connection, bench: Bench, part: Part) -> str | None:
    """Sends the findings of a part; returns a sentence where it failed, else None."""
    try:
        bench.prepare()
        connection.send(Started())
        for finding in part.work(bench, *part.arguments):
            connection.send(finding)
    except BrokenPipeError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever a rule or a peer raises is that part's alone
        return sentence(error)
    return None
