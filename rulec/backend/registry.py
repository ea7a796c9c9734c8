"""Backends by name, ours and others', through one entry-point group."""

from __future__ import annotations

import functools
from importlib.metadata import EntryPoint
from typing import Any

from rulec.backend.protocol import Backend
from rulec.errors import BackendUnavailable, RulecError
from rulec.language.source import did_you_mean
from rulec.plugins import answer, loaded, package_of, points_of

GROUP = "rulec.backends"

#: Names of devices, libraries and languages, and the backends that are for them.
MEANT = {
    **dict.fromkeys(("cuda", "gpu", "nvidia", "nvrtc"), ("cupy", "triton")),
    **dict.fromkeys(("torch", "pytorch"), ("cpu", "triton")),
    **dict.fromkeys(("amd", "rocm", "hip"), ("triton",)),
    **dict.fromkeys(("metal", "mps", "apple"), ("mlx",)),
    **dict.fromkeys(("llvm", "numba"), ("cpu",)),
    **dict.fromkeys(("c99", "gcc", "clang", "cc"), ("c",)),
    **dict.fromkeys(("xla", "tpu"), ("jax",)),
}


@functools.cache
def _entry_points() -> dict[str, tuple[EntryPoint, ...]]:
    return points_of(GROUP)


def names() -> list[str]:
    """The names of all installed backends, sorted, whether usable here or not."""
    return sorted(_entry_points())


@functools.cache
def get(name: str) -> Backend:
    """The backend of this name; BackendUnavailable for an unknown name and for a backend that does not load.

    So it is for a name that several packages have, but rulec's own come first. The backend may still be unusable here:
    ask `reason_against` it, or use `usable`.
    """
    if name not in _entry_points():
        known = names()
        other = [backend for backend in MEANT.get(name.lower(), ()) if backend in known]
        hint = f"; did you mean {' or '.join(map(repr, other))}?" if other else did_you_mean(name, known)
        raise BackendUnavailable(f"there is no backend {name!r}{hint}: installed are {', '.join(known)}")
    points = _entry_points()[name]
    try:
        kind = loaded(f"backend {name!r}", points)
        backend: Backend = answer(kind, f"backend {name!r} of {package_of(points[0])} cannot be made")
    except RulecError as error:
        raise BackendUnavailable(str(error)) from error
    lacks = [member for member in ("name", "unavailable_reason", "emit", "build") if not hasattr(backend, member)]
    if lacks:
        raise BackendUnavailable(
            f"{points[0].value} of {package_of(points[0])} is no backend, for it has no {lacks[0]}: give a class with "
            f"a name and the methods unavailable_reason, emit and build"
        )
    return backend


def reason_against(backend: Any) -> str | None:
    """Why a backend cannot run here; None where it can. A backend that fails to answer cannot."""
    try:
        reason: str | None = answer(backend.unavailable_reason, "it fails to say whether it can run")
    except RulecError as error:
        return str(error)
    return reason


def usable(chosen: str | Backend) -> Backend:
    """The backend of this name, or the backend itself; BackendUnavailable with the reason where it cannot run here."""
    backend = get(chosen) if isinstance(chosen, str) else chosen
    reason = reason_against(backend)
    if reason is not None:
        raise BackendUnavailable(f"backend {backend.name!r} cannot run here: {reason}")
    return backend
