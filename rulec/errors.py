"""Every error that rulec raises on purpose.

The message for a user's mistake is one sentence: the fault, its place, and the remedy.
"""

from __future__ import annotations

from collections.abc import Iterable


class RulecError(Exception):
    """Base of all errors raised by rulec."""


class RuleError(RulecError, ValueError):
    """A mistake in a rule: in its text, its Python function, or its composition.

    `str()` gives `file:line:column: message` followed by the line and a caret, where a place is known. `others` are
    the other mistakes of the same text, each with its place. `code` is the kind of mistake: `yaml` for a text that is
    not the YAML of rule files, `key` for a key or its value, `missing` for the name of a rule or file that is none,
    `component` for a rule that does not fit where it is named, `expression` for a step or another expression, and
    `rule` for everything else. A warning has the code `unread`, and is raised by no function.
    """

    code = "rule"

    def __init__(self, message: str, *, place: str = "", excerpt: str = "") -> None:
        self.message = message
        self.place = place
        self.others: tuple[RuleError, ...] = ()
        text = f"{place}: {message}" if place else message
        super().__init__(f"{text}\n{excerpt}" if excerpt else text)


class HyperError(RulecError, ValueError):
    """An unknown hyper-parameter, or a value outside its range."""


class TensorError(RulecError, ValueError):
    """A parameter or gradient of the wrong shape, dtype, device or memory layout."""


class StateMismatch(RulecError, ValueError):
    """A saved state of another rule or of other parameters."""


class PartialUpdate(RulecError, RuntimeError):
    """A step failed after some tensors were written; the message names them.

    In a step tensor by tensor, `updated` has the names of the written tensors and `pending` the names of the others; in
    other steps both are empty.
    """

    def __init__(self, message: str, updated: Iterable[str] = (), pending: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.updated, self.pending = list(updated), list(pending)


def interrupted(name: str) -> PartialUpdate:
    """The error of the call after a step of this optimizer, or rule, that was interrupted while it wrote."""
    return PartialUpdate(
        f"the last step of {name} was interrupted while it was written, so parameters, states and step counts may not "
        f"agree: load a checkpoint, or call again to go on with them as they are"
    )


class StepTooLarge(RulecError, MemoryError):
    """A step that needs more memory than its limit; nothing was done. `needed` has the bytes by purpose."""

    def __init__(self, message: str, needed: object) -> None:
        self.needed = needed
        super().__init__(message)


class MissingExtra(RulecError, ModuleNotFoundError):
    """A package of an extra that is not installed. The message has all that are missing, and the command for them."""


class BackendUnavailable(RulecError, RuntimeError):
    """A backend that cannot run here. The message has the package to install or the setting to change."""


class BackendUnsupported(RulecError, NotImplementedError):
    """A backend without a way to express a part of the rule."""

    def __init__(self, backend: str, what: str, rule: str, instead: str = "") -> None:
        self.backend, self.what, self.rule = backend, what, rule
        super().__init__(
            f"backend {backend!r} cannot express {what} of rule {rule!r}: "
            f"{f'{instead}, or ' if instead else ''}choose another backend (`rulec doctor` lists them)"
        )


class InternalError(RulecError, AssertionError):
    """A defect of rulec itself: an invariant of a compiler pass does not hold."""
