"""The statistics of an optimizer's steps: when they are measured, and which ranks complete them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from rulec.errors import RulecError
from rulec.runtime.statistics import StepStatistics, measured_together
from rulec.torch.distributed.mesh import ShardRanks, shard_ranks_of
from rulec.torch.groups.engine import TensorRef, TorchEngine
from rulec.torch.groups.options import Options
from rulec.torch.groups.routes import Route
from rulec.torch.tensors.library import as_tensor, numbers_on_host


class StepMeasurements:
    """The statistics of the steps of some engines; without a schedule nothing is measured.

    `routes` and `tensor_refs` are the tensors of the engines, in one order.
    """

    def __init__(
        self, engines: Sequence[TorchEngine], routes: Sequence[Route], tensor_refs: Sequence[TensorRef],
        options: Options,
    ) -> None:  # fmt: skip
        self._engines, self._routes = engines, routes
        self._schedule, self._reducer = options.schedule, options.reducer
        #: The ranks with shards of each tensor whose statistics they complete together, by its identity.
        self._shard_ranks = {} if self._reducer is None else _shard_ranks(routes, tensor_refs)
        #: The statistics from before the engines were built, until some are measured.
        self._earlier: StepStatistics | None = None
        #: Whether the present step measures.
        self._due = False

    @property
    def is_next_apart(self) -> bool:
        """Whether this step measures, and the next one does not: their launches differ."""
        return self._schedule is not None and self._schedule.every > 1 and self._schedule.due

    def begin(self) -> None:
        """Begins a step, which measures statistics in its turn."""
        if self._schedule is not None:
            self._due = self._schedule.due
            for engine in self._engines:
                engine.statistics.begin(self._due)

    def begin_apart(self) -> None:
        """Begins a step of some parameters after others; HyperError where statistics see several of them."""
        if self._schedule is not None:
            for engine in self._engines:
                engine.statistics.check_apart("a backward pass that updates")
            if self._reducer is not None:
                self._reducer.open(self._schedule.due)
        self.begin()

    def complete(self) -> None:
        """Sends the statistics of shards in this step to the ranks that complete them."""
        if self._reducer is not None and self._schedule is not None:
            self._reducer.send(self._schedule.steps, [engine.statistics for engine in self._engines], self._shard_ranks)

    def end(self, taken: bool) -> None:
        """Ends a step: counts it where it was taken; else the statistics of the last one are there again."""
        schedule = self._schedule
        if schedule is None:
            return
        if taken:
            self._earlier = None if self._due else self._earlier
            schedule.advance()
            return
        for engine in self._engines:
            engine.statistics.take_back()

    def keep(self, before: StepMeasurements) -> None:
        """Takes over the statistics of engines before these; none where their ranks did not take one step."""
        if self._schedule is not None:
            with suppress(RulecError):
                self._earlier = before.last()

    def last(self) -> StepStatistics:
        """The statistics of the last step that measured them."""
        if self._earlier is not None:
            return self._earlier
        measured = measured_together([(e.statistics, e.indices.__getitem__) for e in self._engines])
        names = dict.fromkeys(name for engine in self._engines for name in engine.statistics.names)
        tensor_names, step = (
            [route.name for route in self._routes],
            0 if self._schedule is None else self._schedule.last,
        )
        return StepStatistics(step, measured, [*names], tensor_names, as_tensor, numbers_on_host)


def _shard_ranks(routes: Sequence[Route], tensor_refs: Sequence[TensorRef]) -> dict[int, ShardRanks]:
    """The ranks with shards of each tensor, by its identity."""
    ranks = shard_ranks_of([route.param for route in routes])
    routed = zip(routes, tensor_refs, strict=True)
    known = {id(engine.tensors[i]): ranks.get(id(route.param)) for route, (engine, i) in routed}
    return {key: each for key, each in known.items() if each is not None}
