"""The budget of everyday tests, held to by tests that keep it and that do not."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import budget


class Item:
    """What the plugin asks of a test."""

    def __init__(self, slow: bool = False) -> None:
        self.slow = slow

    def get_closest_marker(self, name: str) -> str | None:
        return name if self.slow else None


def check_run(item: Item, before: float, after: float, *, compiled: bool = False, slowness: float = 1.0) -> None:
    """A test that begins and ends at these seconds of the processor."""
    seconds = iter([before, after])
    plugin = budget.Budget(lambda: next(seconds), lambda began: compiled, lambda: slowness)
    call = plugin.pytest_runtest_call(item)  # type: ignore[arg-type]
    next(call)
    with pytest.raises(StopIteration):
        next(call)


def test_a_test_that_takes_more_fails() -> None:
    with pytest.raises(pytest.fail.Exception, match=r"took 2\.5 s of the processor, and an everyday test has 1"):
        check_run(Item(), 3.0, 5.5)


def test_slow_tests_short_ones_and_what_compiles_pass() -> None:
    check_run(Item(slow=True), 3.0, 5.5)
    check_run(Item(), 3.0, 3.9)
    check_run(Item(), 3.0, 5.5, compiled=True)


def test_a_busy_processor_is_allowed_for() -> None:
    check_run(Item(), 3.0, 5.5, slowness=3.0)


def test_names_of_long_tests_are_written(tmp_path: Path) -> None:
    seconds = iter([0.0, 2.5, 3.0, 3.4, 4.0, 6.0])
    slowness = iter([1.0, 3.0])
    files = tmp_path / "long.txt", tmp_path / "costs.txt"
    plugin = budget.Record(lambda: next(seconds), lambda: next(slowness), *files)
    for name in ("b::long", "a::short", "c::on_a_busy_machine"):
        item = SimpleNamespace(user_properties=[])
        call = plugin.pytest_runtest_call(item)  # type: ignore[arg-type]
        next(call)
        with pytest.raises(StopIteration):
            next(call)
        report = SimpleNamespace(when="call", nodeid=name, user_properties=item.user_properties)
        plugin.pytest_runtest_logreport(report)  # type: ignore[arg-type]
    plugin.pytest_sessionfinish(SimpleNamespace(config=object()))  # type: ignore[arg-type]
    assert plugin.file.read_text() == "b::long\n"
    assert plugin.costs.read_text() == "40 a::short\n250 b::long\n200 c::on_a_busy_machine\n"


def test_every_long_test_is_one_that_there_is() -> None:
    files = {name.partition("::")[0] for name in budget.long_tests()}
    assert [file for file in sorted(files) if not (budget.LONG.parents[2] / file).is_file()] == []


def test_processor_seconds_grow_with_work() -> None:
    before = budget.processor_seconds()
    assert budget.slowness() > 0
    assert budget.processor_seconds() > before
