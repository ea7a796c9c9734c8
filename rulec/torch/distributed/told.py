"""Sentences for a step without some of its processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rulec.errors import RulecError
from rulec.runtime.distributed.failure import Unreached


def behind(cause: str) -> RulecError:
    """The error of a process that others have left behind."""
    return RulecError(
        f"this process failed after all had agreed on a step ({cause}), and others have taken that step: load a "
        f"checkpoint in every process"
    )


@contextmanager
def reaching(processes: str) -> Iterator[None]:
    """A block of messages to processes; RulecError where they do not arrive."""
    try:
        yield
    except RuntimeError as error:
        raise Unreached(
            f"another process of {processes} has ended, or did not answer in the time of its process group: start all "
            f"again from a checkpoint ({str(error).splitlines()[0][:200]})"
        ) from error
