"""An everyday test has a second of processor time; one that needs more is slow.

The second is that of the machine that the budget was set on: a loop of known work, timed beside the test, says how fast
this one is just now. So a busy machine judges as an idle one does.

`long.txt` names the tests that need more only because they compile: `make long` writes it, from a run in which no
kernel was kept. They are slow without a mark of their own. The same run writes `costs.txt`, what a case of each test
function takes; tests/selection.py shares out the time of `make test` and `.ci/run` by it.
"""

from __future__ import annotations

import os
import resource
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest

from tests import selection

#: Seconds of the processor that an everyday test may take.
SECONDS = 1.0

#: The tests that a fresh clone runs for longer.
LONG = Path(__file__).parent / "golden" / "long.txt"

#: Additions in the loop, and what it takes on the reference.
_ADDITIONS, _REFERENCE = 1_000_000, 0.0215


def processor_seconds() -> float:
    """What this process and those it has waited for have taken."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def slowness() -> float:
    """How many times as long as the reference this processor takes for known work; the least of three."""
    return min(_loop() for _ in range(3)) / _REFERENCE


def _loop() -> float:
    began, total = time.process_time(), 0
    for i in range(_ADDITIONS):
        total += i
    return time.process_time() - began


def compiled_since(began: float) -> bool:
    """Whether anything was put into the caches of compiled code."""
    kernels, xla = (Path(os.environ[name]) for name in ("RULEC_CACHE_DIR", "JAX_COMPILATION_CACHE_DIR"))
    folders = [xla, *kernels.glob("*"), *kernels.glob("*/*")]
    return any(folder.stat().st_mtime >= began - 1 for folder in folders if folder.is_dir())


@dataclass(frozen=True)
class Budget:
    """The plugin: fails everyday tests that passed but took more than they may.

    `clock` gives the seconds of the processor, `compiled` whether something was compiled since a time, `slowness` how
    many times as long as the reference this processor takes.
    """

    clock: Callable[[], float]
    compiled: Callable[[float], bool]
    slowness: Callable[[], float]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        began, before = time.time(), self.clock()
        yield
        spent = self.clock() - before
        if spent <= SECONDS or item.get_closest_marker("slow") or self.compiled(began):
            return
        fair = spent / self.slowness()
        if fair > SECONDS:
            pytest.fail(
                f"took {fair:.1f} s of the processor, and an everyday test has {SECONDS:g}: make it cheaper, or mark "
                "it slow and leave a cheap one that finds the same fault",
                pytrace=False,
            )


@cache
def long_tests() -> frozenset[str]:
    """The names of the tests in `long.txt`."""
    return frozenset(LONG.read_text().splitlines())


@dataclass(frozen=True)
class Record:
    """The plugin of `make long`: writes the names of the tests that took longer than they may, with what they compiled.

    It writes the costs of test functions too. A worker measures; the process that began the run reads what it measured,
    and writes.
    """

    clock: Callable[[], float]
    slowness: Callable[[], float]
    file: Path = LONG
    costs: Path = selection.COSTS
    names: set[str] = field(default_factory=set)
    spent: dict[str, list[float]] = field(default_factory=dict)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        before = self.clock()
        yield
        spent = self.clock() - before
        item.user_properties.append(("seconds", spent))
        if spent > SECONDS and spent / self.slowness() > SECONDS:
            item.user_properties.append(("long", True))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call":
            return
        properties = dict(report.user_properties)
        self.spent.setdefault(report.nodeid.partition("[")[0], []).append(float(str(properties["seconds"])))
        if "long" in properties:
            self.names.add(report.nodeid)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if not hasattr(session.config, "workerinput"):
            self.file.write_text("".join(f"{name}\n" for name in sorted(self.names)))
            costs = {name: round(100 * statistics.median(each)) for name, each in sorted(self.spent.items())}
            self.costs.write_text("".join(f"{cost} {name}\n" for name, cost in costs.items() if cost > 1))
