"""The functions of a device's backend that write noise."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from rulec.backend import registry
from rulec.errors import RulecError

#: The backends that write noise, by type of device.
_BACKENDS = {"cpu": "cpu", "cuda": "triton"}


@functools.cache
def writer(device: str) -> Callable[..., Any] | None:
    """The `fill_noise` of the backend for a type of device; None where it has none, or cannot run."""
    return _offered(device, "fill_noise")


@functools.cache
def line_writer(device: str) -> Callable[..., Any] | None:
    """The `fill_lines` of the backend for a type of device: noise of a direction into each line of a matrix."""
    return _offered(device, "fill_lines")


def _offered(device: str, name: str) -> Callable[..., Any] | None:
    try:
        function = getattr(registry.usable(_BACKENDS[device]), name, None) if device in _BACKENDS else None
    except RulecError:
        return None
    return function if callable(function) else None
