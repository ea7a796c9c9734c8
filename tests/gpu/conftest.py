"""Fixtures of the tests of a device."""

from __future__ import annotations

import pytest

from benchmarks.gpu.check import BACKENDS
from rulec.backend import registry
from rulec.errors import BackendUnavailable


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    """The name of a backend that is usable here."""
    try:
        registry.usable(request.param)
    except BackendUnavailable as error:
        pytest.skip(str(error))
    return str(request.param)
