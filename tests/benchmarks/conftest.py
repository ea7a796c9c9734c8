"""What measures the project is tested with the slow tests: `make slow ARGS=tests/benchmarks`."""

from __future__ import annotations

import pytest


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker(pytest.mark.slow)
