"""Trees of Python's grammar, in several threads."""

from __future__ import annotations

import ast
import gc
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest

from rulec.language.parse.located import syntax_tree

TEXT = "\n".join(f"def f{i}(a, b):\n    return (a + b*(a - {i}))**2" for i in range(20))


@pytest.fixture
def eager_collector() -> Iterator[None]:
    """The collector of garbage runs often, and lets another thread go on while it runs, as JAX's callbacks do."""

    def pause(*_: object) -> None:
        time.sleep(0)

    threshold, interval = gc.get_threshold(), sys.getswitchinterval()
    gc.callbacks.append(pause)
    gc.set_threshold(5)
    sys.setswitchinterval(1e-6)
    yield
    gc.callbacks.remove(pause)
    gc.set_threshold(*threshold)
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("eager_collector")
def test_threads_may_make_trees_at_once() -> None:
    """Python 3.11 fails here with its own `ast.parse`."""
    start = Barrier(4)

    def trees(_: int) -> list[str]:
        start.wait()
        return [ast.unparse(syntax_tree(TEXT)) for _ in range(3)]

    with ThreadPoolExecutor(4) as threads:
        texts = {text for made in threads.map(trees, range(4)) for text in made}
    assert texts == {ast.unparse(ast.parse(TEXT))}
