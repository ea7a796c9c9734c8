"""The error of one process in work that others wait for: it sends them something until all of them can raise it."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import TypeVar

from rulec.errors import RulecError

Result = TypeVar("Result")


class Told(RulecError):
    """An error of one process that others raise too, in the same words."""


class Unreached(RulecError):
    """The error of a process whose messages do not reach another one."""


class Failure:
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
        if isinstance(self.error, Told):
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
