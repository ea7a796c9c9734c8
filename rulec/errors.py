"""Every error that rulec raises on purpose.

A user's mistake is one sentence that says what is wrong, where, and what to do about it.
"""

from __future__ import annotations

from collections.abc import Iterable


class RulecError(Exception):
    """Base of all errors raised by rulec."""


class RuleError(RulecError, ValueError):
    """A mistake in a rule: its text, its Python function, or how it is composed.

    `str()` gives `file:line:column: message` followed by the line and a caret, where a place is known.
    """

    def __init__(self, message: str, *, place: str = "", excerpt: str = "") -> None:
        self.message = message
        self.place = place
        text = f"{place}: {message}" if place else message
        super().__init__(f"{text}\n{excerpt}" if excerpt else text)


class HyperError(RulecError, ValueError):
    """A hyper-parameter that the rule does not have, or a value outside its range."""


class TensorError(RulecError, ValueError):
    """A parameter or gradient of the wrong shape, dtype, device or memory layout."""


class StateMismatch(RulecError, ValueError):
    """A saved state that does not belong to this rule or to these parameters."""


class PartialUpdate(RulecError, RuntimeError):
    """A step failed after some tensors were written; the message names them.

    Where a step is taken tensor by tensor, `updated` are the names of those written and `pending` of those that were
    not; otherwise both are empty.
    """

    def __init__(self, message: str, updated: Iterable[str] = (), pending: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.updated, self.pending = list(updated), list(pending)


class StepTooLarge(RulecError, MemoryError):
    """A step that would take more memory than it was allowed; nothing was done. `found` says how much, and for what."""

    def __init__(self, message: str, found: object) -> None:
        self.found = found
        super().__init__(message)


class BackendUnavailable(RulecError, RuntimeError):
    """A backend that cannot run here; the message says what to install or change."""


class BackendUnsupported(RulecError, NotImplementedError):
    """A backend that has no way to express something the rule needs."""

    def __init__(self, backend: str, what: str, rule: str) -> None:
        self.backend, self.what, self.rule = backend, what, rule
        super().__init__(
            f"backend {backend!r} cannot express {what} of rule {rule!r}: "
            f"choose another backend (`rulec doctor` lists them)"
        )


class InternalError(RulecError, AssertionError):
    """A defect of rulec itself: an invariant that a compiler pass must keep did not hold."""
