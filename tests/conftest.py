"""What every test shares: one throw-away kernel cache per run, gpu tests that ask for a device, and fixed examples."""

from __future__ import annotations

import os
import shutil
import tempfile

import pytest
from hypothesis import settings

# The same examples in every run, however long they take: what fails here fails everywhere. To look for new ones give
# pytest --hypothesis-profile=explore.
settings.register_profile("fixed", derandomize=True, deadline=None)
settings.register_profile("explore", deadline=None)
settings.load_profile("fixed")

_CACHE = pytest.StashKey[str]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--refresh-golden", action="store_true", help="write the sources kept in tests/golden anew")


def pytest_configure(config: pytest.Config) -> None:
    """Point RULEC_CACHE_DIR at an empty folder, so that tests neither read nor fill the user's cache.

    The controlling process makes it and the xdist workers inherit it: each kernel is compiled once per run, and the
    locking of the cache is exercised by every run.
    """
    if hasattr(config, "workerinput"):
        return
    config.stash[_CACHE] = tempfile.mkdtemp(prefix="rulec-test-cache-")
    os.environ["RULEC_CACHE_DIR"] = config.stash[_CACHE]


def pytest_unconfigure(config: pytest.Config) -> None:
    if _CACHE in config.stash:
        shutil.rmtree(config.stash[_CACHE], ignore_errors=True)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None:
        torch = pytest.importorskip("torch")
        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")
