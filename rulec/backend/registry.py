"""Backends by name, ours and others', through one entry-point group."""

from __future__ import annotations

import functools
from importlib.metadata import EntryPoint, entry_points

from rulec.backend.protocol import Backend
from rulec.errors import BackendUnavailable
from rulec.language.source import did_you_mean

GROUP = "rulec.backends"


@functools.cache
def _entry_points() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP)}


def names() -> list[str]:
    """The names of all installed backends, sorted, whether usable here or not."""
    return sorted(_entry_points())


@functools.cache
def get(name: str) -> Backend:
    """The backend of this name; BackendUnavailable for an unknown name and for a backend that does not load.

    It may still be unusable here: ask its `unavailable_reason()`, or use `usable`.
    """
    if name not in _entry_points():
        known = names()
        raise BackendUnavailable(
            f"there is no backend {name!r}{did_you_mean(name, known)}: installed are {', '.join(known)}"
        )
    try:
        backend = _entry_points()[name].load()()
    except ImportError as error:
        raise BackendUnavailable(f"backend {name!r} does not load: {error}") from error
    return backend  # type: ignore[no-any-return]


def usable(chosen: str | Backend) -> Backend:
    """The backend of this name, or the backend itself; BackendUnavailable with the reason where it cannot run here."""
    backend = get(chosen) if isinstance(chosen, str) else chosen
    reason = backend.unavailable_reason()
    if reason is not None:
        raise BackendUnavailable(f"backend {backend.name!r} cannot run here: {reason}")
    return backend
