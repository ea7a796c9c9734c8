"""The ranks with shards of the same tensors, and their messages in a step.

`DeferredError` holds the first error of a rank: the rank keeps the collectives going with placeholder data until all
ranks raise together.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from rulec.errors import RulecError
from rulec.language.expr.node import Op
from rulec.runtime.distributed.owners import Assignment, Schedule, Work


class Pending(Protocol):
    """An all-to-all that has begun."""

    def wait(self) -> None:
        """Waits until the all-to-all is over."""
        ...

    def received(self) -> Any:
        """The vectors that the ranks sent to this rank, one after the other."""
        ...


class RankGroup(Protocol):
    """The process group of the ranks along dimensions of a mesh; `rank` is this rank among `size`."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def reduce(self, op: Op, numbers: Any, of_host: bool = False) -> Any:
        """All-reduces a vector in float64, element by element, over these ranks; all get the same bits.

        `of_host` marks words of the host, which are no values of a device in any rank.
        """
        ...

    def exchange(self, sent: Any, counts: Sequence[int], received: Sequence[int], dtype: str) -> Pending:
        """Begins an all-to-all: `counts` are the elements of `sent` for each rank, `received` those from each rank.

        Elements travel in `dtype`, and arrive in the dtype of `sent`.
        """
        ...


class StepCoordinator(Protocol):
    """Coordinates the collectives of a step: ranks agree on the step, and raise errors together.

    `failure` is the deferred error of this rank.
    """

    failure: DeferredError

    def reduce(self, op: Op, rank_group: RankGroup, numbers: Any) -> Any:
        """All-reduces as `rank_group.reduce` does; the message has the coordinator's words too."""
        ...

    def assigned(self, rank_group: RankGroup, works: Sequence[Work], chosen: Assignment) -> None:
        """Records the owner ranks of tensors, and their work."""
        ...

    def exchanged(self, rank_group: RankGroup, schedule: Schedule) -> None:
        """Records tensors that travel to their owner ranks, and results on their way back."""
        ...

    def close(self) -> None:
        """Ends a round of reductions. RulecError, in all ranks, where they do not agree on the step."""
        ...

    def check(self) -> None:
        """Comes before a round. RulecError, in all ranks, where one has failed or they do not agree."""
        ...

    def conclude(self) -> None:
        """Comes before anything is written. RulecError, in all ranks, where one has failed."""
        ...

    def end(self) -> None:
        """Comes when everything is written. RulecError, in all ranks, where one has failed in later rounds."""
        ...

    def fail(self, error: Exception, tensors: Sequence[str]) -> Exception:
        """Reports an error at some tensors to the waiting ranks. Returns the error that this rank raises."""
        ...


Result = TypeVar("Result")


class RemoteError(RulecError):
    """The error of a remote rank, which all ranks raise in the same words."""


class Unreached(RulecError):
    """The error of a rank whose messages do not reach another rank."""


class DeferredError:
    """Defers this rank's first error in a step with collectives, with the names of the failed tensors.

    After the error this rank does no more work, and keeps the collectives going with placeholder data until all ranks
    raise together. `turn` counts the common rounds of all ranks: an earlier error is the cause of later ones in other
    ranks.
    """

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.turn = self.at = 0
        self._tensors: Sequence[str] = ()

    def attempt(self, work: Callable[[], Result], tensors: Sequence[str] = ()) -> Result | None:
        """Calls `work` on these tensors and returns its result; None where it fails, and after a failure."""
        if self.error is None:
            try:
                return work()
            except Exception as error:  # noqa: BLE001 - others wait, whatever it is
                self.note(error, tensors)
        return None

    def note(self, error: Exception, tensors: Sequence[str]) -> None:
        """Keeps an error at these tensors, if it is the first."""
        if self.error is None:
            traceback.clear_frames(error.__traceback__)  # their arrays: memory may be what was missing
            self.error, self.at, self._tensors = error, self.turn, tensors

    def sentence(self, process: int) -> str:
        """The message of the error that all ranks raise; `process` is this rank's number."""
        if isinstance(self.error, RemoteError):
            return str(self.error)
        return (
            f"process {process} failed in work that all processes wait for, so none goes on with this step: "
            f"{self}; once the cause is gone, take the step again"
        )

    def __str__(self) -> str:
        """The names of the tensors, and the message of the error."""
        names = ", ".join(self._tensors[:3]) + (", ..." if len(self._tensors) > 3 else "")
        said = f"{type(self.error).__name__}: {self.error}".splitlines()[0][:200]
        return f"{names}: {said}" if names else said
