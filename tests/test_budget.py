"""The budget of everyday tests, held to by tests that keep it and that do not."""

from __future__ import annotations

import pytest

from tests import budget


class Item:
    """What the plugin asks of a test."""

    def __init__(self, slow: bool = False) -> None:
        self.slow = slow

    def get_closest_marker(self, name: str) -> str | None:
        return name if self.slow else None


def run(item: Item, before: float, after: float, *, compiled: bool = False, slowness: float = 1.0) -> None:
    """A test that begins and ends at these seconds of the processor."""
    seconds = iter([before, after])
    plugin = budget.Budget(lambda: next(seconds), lambda began: compiled, lambda: slowness)
    call = plugin.pytest_runtest_call(item)  # type: ignore[arg-type]
    next(call)
    with pytest.raises(StopIteration):
        next(call)


def test_a_test_that_takes_more_fails() -> None:
    with pytest.raises(pytest.fail.Exception, match=r"took 2\.5 s of the processor, and an everyday test has 1"):
        run(Item(), 3.0, 5.5)


def test_slow_tests_short_ones_and_what_compiles_pass() -> None:
    run(Item(slow=True), 3.0, 5.5)
    run(Item(), 3.0, 3.9)
    run(Item(), 3.0, 5.5, compiled=True)


def test_a_busy_processor_is_allowed_for() -> None:
    run(Item(), 3.0, 5.5, slowness=3.0)


def test_processor_seconds_grow_with_work() -> None:
    before = budget.processor_seconds()
    assert budget.slowness() > 0
    assert budget.processor_seconds() > before
