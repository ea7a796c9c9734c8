"""CuPy's stand-in, for tests of several files."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.backends import cuda_stand_in


@pytest.fixture
def cupy() -> Iterator[Any]:
    """CuPy's stand-in, with nothing waiting after it."""
    with cuda_stand_in.installed() as module:
        yield module
        cuda_stand_in.flush()
