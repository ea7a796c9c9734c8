"""What every test shares: kernel caches of the checkout, gpu tests that ask for a device, and fixed examples."""

from __future__ import annotations

import gc
import hashlib
import os
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis.internal.conjecture import providers

from rulec_backends.c.compile import processor
from tests import budget, ledger, library, selection

# The same examples in every run, however long they take: what fails here fails everywhere. To look for new ones give
# pytest --hypothesis-profile=explore.
settings.register_profile("fixed", derandomize=True, deadline=None)
settings.register_profile("explore", deadline=None)
settings.load_profile("fixed")

# Hypothesis would take numbers of all imported sources among its examples: they would be others after every change of
# the project, and their collection takes a tenth of pytest's.
providers.is_local_module_file = lambda file: False


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--refresh-golden", action="store_true", help="write the sources kept in tests/golden anew")
    parser.addoption(
        "--budget", action="store_true", help="fail everyday tests that take over a second of processor time"
    )
    parser.addoption("--write-long", action="store_true", help="write the names of tests that take over a second anew")
    parser.addoption("--prove", choices=("all", "new"), help="write the ledger; `all`: prove anew what it has")


def pytest_configure(config: pytest.Config) -> None:
    """Points the caches of rulec and of JAX at folders of this checkout, apart from the user's own.

    Their entries are named by what they hold, so they stay from run to run: a kernel is compiled once for a checkout.
    xdist's workers inherit the folders, and so exercise the locks. `pytest --cache-clear` empties them; tests of the
    caches themselves use empty folders.
    """
    if not hasattr(config, "workerinput"):
        folders = kept_folders(config.rootpath)
        for name, folder in folders.items():
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            os.environ[name] = str(folder)
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        # torch's threads wait awake: with two, small models take six times as long. Tests of threads set their number.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        if config.getoption("--prove"):
            os.environ[ledger.WHOLE] = "1"
        if config.getoption("--prove") == "all":
            os.environ[ledger.ANEW] = "1"
    if config.getoption("--budget"):
        config.pluginmanager.register(budget.Budget(budget.processor_seconds, budget.compiled_since, budget.slowness))
    if config.getoption("--write-long"):
        config.pluginmanager.register(budget.Record(budget.processor_seconds, budget.slowness))


def kept_folders(root: Path) -> dict[str, Path]:
    """The environment's name of each cache and its folder. XLA's code holds for one processor; rulec's names it."""
    machine = hashlib.sha256(processor().encode()).hexdigest()[:16]
    kept = root / ".pytest_cache" / "d"
    return {
        "RULEC_CACHE_DIR": kept / "kernels",
        "RULEC_TESTS_COMPILED": kept / "compiled",
        "JAX_COMPILATION_CACHE_DIR": kept / f"xla-{machine}",
        ledger.FOLDER: kept / "proved",
    }


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Collects without the collector of garbage, to which a quarter of the time went: nearly all of it stays.

    What stays is looked through no more: with it a full collection would take seconds, in one test or another.
    """
    gc.disable()
    result = yield
    gc.collect()
    gc.freeze()
    gc.enable()
    return result


def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.config.getoption("--prove") and not hasattr(session.config, "workerinput"):
        ledger.write()


@pytest.fixture(autouse=True)
def first_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test's strategies have the seeds that they would have in a process of its own."""
    monkeypatch.setattr("rulec.es.perturbations._used", set())


def pytest_itemcollected(item: pytest.Item) -> None:
    library.rank(item)
    if item.nodeid in budget.long_tests() and not item.config.getoption("--write-long"):
        item.add_marker(pytest.mark.slow)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Ranks all tests that were collected, before pytest chooses by marks."""
    selection.rank(items)
    config.stash[selection.LEFT] = selection.left(items)
    if hasattr(config, "workerinput"):
        config.workeroutput["left"] = config.stash[selection.LEFT]  # type: ignore[attr-defined]
    session.stash[selection.COLLECTED] = [*items]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Takes what a worker of xdist counted: the process that began the run collects nothing."""
    counts = getattr(node, "workeroutput", {}).get("left")
    if counts is not None:
        node.config.stash[selection.LEFT] = tuple(counts)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Says what `make test` left out."""
    later, whole = config.stash.get(selection.LEFT, (0, 0))
    if f"not {selection.LATER}" in config.option.markexpr and later:
        terminalreporter.write_line(f"left to .ci/run: {later:,} tests; left to make whole: {whole:,} more")


def pytest_runtest_setup(item: pytest.Item) -> None:
    ledger.marked = item.get_closest_marker("proof") is not None
    if item.get_closest_marker("gpu") is not None:
        torch = pytest.importorskip("torch")
        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """JAX would keep what each file compiled to the end: gigabytes in a run of all tests."""
    if "jax" in sys.modules and (nextitem is None or nextitem.path != item.path):
        sys.modules["jax"].clear_caches()
