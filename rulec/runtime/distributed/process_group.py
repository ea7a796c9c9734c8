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
    """An exchange that has begun."""

    def wait(self) -> None:
        """Waits until it is over."""
        ...

    def received(self) -> Any:
        """The vectors that the processes sent to this one, one after the other."""
        ...


class RankGroup(Protocol):
    """The processes along dimensions of a mesh; `rank` is this one among `size`."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def reduce(self, op: Op, numbers: Any) -> Any:
        """A vector in float64, reduced place by place over these processes; the same bits in all of them."""
        ...

    def exchange(self, sent: Any, counts: Sequence[int], received: Sequence[int], dtype: str) -> Pending:
        """Begins to send each process its share of a vector, `counts` long; `received` are the lengths of what comes.

        Elements travel in `dtype`, and come in that of `sent`.
        """
        ...


class StepCoordinator(Protocol):
    """What processes say to one another in a step, beside their numbers; `failure` is the one of this process."""

    failure: DeferredError

    def reduce(self, op: Op, peers: RankGroup, numbers: Any) -> Any:
        """`peers.reduce`, and what is to be said."""
        ...

    def assigned(self, peers: RankGroup, works: Sequence[Work], chosen: Assignment) -> None:
        """Takes note of the owners of tensors, and of their work."""
        ...

    def exchanged(self, peers: RankGroup, schedule: Schedule) -> None:
        """Takes note of tensors that travel to their owners, and of results on their way back."""
        ...

    def close(self) -> None:
        """Ends a round of reductions. RulecError, in all processes, where they do not agree on the step."""
        ...

    def check(self) -> None:
        """Comes before a round. RulecError, in all processes, where one has failed or they do not agree."""
        ...

    def conclude(self) -> None:
        """Comes before anything is written. RulecError, in all processes, where one has failed."""
        ...

    def end(self) -> None:
        """Comes when everything is written. RulecError, in all processes, where one has failed in later rounds."""
        ...

    def fail(self, error: Exception, tensors: Sequence[str]) -> Exception:
        """Tells waiting processes of an error at some tensors. The result is the error to raise here."""
        ...


Result = TypeVar("Result")


class RemoteError(RulecError):
    """An error of one process that others raise too, in the same words."""


class Unreached(RulecError):
    """The error of a process whose messages do not reach another one."""


class DeferredError:
    """The first error of this process in a step with others, if any, and the tensors that it was at.

    After it this process does no more work, and its messages have no meaning. `turn` counts what all processes do one
    after the other; an error is the cause of those that come later in other processes.
    """

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.turn = self.at = 0
        self._tensors: Sequence[str] = ()

    def attempt(self, work: Callable[[], Result], tensors: Sequence[str] = ()) -> Result | None:
        """The result of work on these tensors; None where it fails, and after that."""
        if self.error is None:
            try:
                return work()
            except Exception as error:  # noqa: BLE001 - others wait, whatever it is
                self.note(error, tensors)
        return None

    def note(self, error: Exception, tensors: Sequence[str]) -> None:
        """Takes note of an error at these tensors, if it is the first."""
        if self.error is None:
            traceback.clear_frames(error.__traceback__)  # their arrays: memory may be what was missing
            self.error, self.at, self._tensors = error, self.turn, tensors

    def sentence(self, process: int) -> str:
        """What all processes say, where this one has this number."""
        if isinstance(self.error, RemoteError):
            return str(self.error)
        return (
            f"process {process} failed in work that all processes wait for, so none goes on with this step: "
            f"{self}; once the cause is gone, take the step again"
        )

    def __str__(self) -> str:
        """The tensors, and what the error says."""
        names = ", ".join(self._tensors[:3]) + (", ..." if len(self._tensors) > 3 else "")
        said = f"{type(self.error).__name__}: {self.error}".splitlines()[0][:200]
        return f"{names}: {said}" if names else said
