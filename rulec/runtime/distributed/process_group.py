"""The processes with parts of the same tensors, and their messages in a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from rulec.language.expr.node import Op
from rulec.runtime.distributed.failure import Failure
from rulec.runtime.distributed.owners import Schedule
from rulec.runtime.distributed.sharing import Assignment, Work


class Pending(Protocol):
    """An exchange that has begun."""

    def wait(self) -> None:
        """Waits until it is over."""
        ...

    def received(self) -> Any:
        """The vectors that the processes sent to this one, one after the other."""
        ...


class Peers(Protocol):
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


class Meeting(Protocol):
    """What processes say to one another in a step, beside their numbers; `failure` is the one of this process."""

    failure: Failure

    def reduce(self, op: Op, peers: Peers, numbers: Any) -> Any:
        """`peers.reduce`, and what is to be said."""
        ...

    def assigned(self, peers: Peers, works: Sequence[Work], chosen: Assignment) -> None:
        """Takes note of the owners of tensors, and of their work."""
        ...

    def exchanged(self, peers: Peers, schedule: Schedule) -> None:
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
