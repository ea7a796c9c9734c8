"""Runs of launches: parameters and states are written, autograd is told, and skipped steps are counted."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.autograd.graph import increment_version

from rulec.runtime.buckets.runtime_launch import Launch
from rulec.runtime.engine import run, was_interrupted
from rulec.torch.groups.engine import Home, TorchEngine


class Writer:
    """Writes `params` and their states, by the engines at their homes.

    A run of launches between `begin` and `end` is a part of that step. Any other run is a step of its own where the
    engines keep something for its end: `steps` says so. Where `skips`, an update may be skipped, and the host knows it
    after the run. `unfinished` is True after an interrupt of a run that had written; where groups have states, from the
    run to the call of `finish`, too.
    """

    def __init__(
        self, params: Sequence[Tensor], engines: Sequence[TorchEngine], homes: Sequence[Home], steps: bool, skips: bool,
        publishes: bool,
    ) -> None:  # fmt: skip
        self._params, self._engines, self._homes = params, engines, homes
        self._steps, self._skips, self._publishes = steps, skips, publishes
        self.unfinished = False
        self._opened = self._counted_skip = False
        self._skipped_updates = self._skipped_steps = 0

    def begin(self) -> None:
        """Opens a step of every engine."""
        for engine in self._engines:
            engine.begin()
        self._opened, self._counted_skip = True, False

    def end(self) -> None:
        """Closes the step: values of groups and of the model take their new value."""
        self._opened = False
        for engine in self._engines:
            engine.end()

    def write(self, launches: Sequence[Launch], written: Sequence[Tensor]) -> None:
        """Runs launches of updates of these parameters; autograd is told of all of them."""
        try:
            if self._skips:
                self._write_skipping(launches, written)
            else:
                increment_version(written)  # before the kernel: torch's tensors are still in the caches
                self._run(launches)
            self.unfinished = self._publishes
        except BaseException as error:
            self.unfinished = was_interrupted(launches, error)
            raise

    def finish(self) -> None:
        """Ends a step whose groups show their states."""
        self.unfinished = False

    def _run(self, launches: Sequence[Launch]) -> None:
        if self._opened or not self._steps:
            run(launches)
        else:
            self._step(launches)

    def _step(self, launches: Sequence[Launch]) -> None:
        """Runs launches in a step of their own."""
        for engine in self._engines:
            engine.begin()
        try:
            run(launches)
        finally:
            for engine in self._engines:
                engine.end()

    def _write_skipping(self, launches: Sequence[Launch], written: Sequence[Tensor]) -> None:
        """Runs launches whose updates may be skipped, and tells autograd of the updated parameters."""
        buckets = [bucket for engine in self._engines for bucket in engine.buckets.values()]
        before = [bucket.counts.numbers.copy() for bucket in buckets]
        self._run(launches)
        skipped = sum(engine.skipped for engine in self._engines)
        if skipped == self._skipped_updates:
            increment_version(written)
            return
        self._skipped_updates = skipped
        self._skipped_steps += not self._counted_skip
        self._counted_skip = self._opened
        counted = ((b.tensors, old, b.counts.numbers) for b, old in zip(buckets, before, strict=True))
        updated = {id(t) for tensors, *counts in counted for t, i, j in zip(tensors, *counts, strict=True) if i != j}
        homes = zip(self._params, self._homes, strict=True)
        increment_version([p for p, (engine, i) in homes if id(engine.tensors[i]) in updated])

    @property
    def skipped_steps(self) -> int:
        """The number of steps in which a tensor's update was skipped. Waits for devices."""
        there = max((engine.skipped_there.steps(engine.host) for engine in self._engines), default=0)
        return self._skipped_steps + there
