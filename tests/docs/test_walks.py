"""The walks of steps that the manual shows are of modules that there are, and of today's code."""

from __future__ import annotations

import json

import pytest

from tests.backends.triton_process import require_interpreter
from tests.docs.walks import DATA, WALKS, run
from tests.test_layering import ROOT


def test_walks_go_through_modules_that_are_there() -> None:
    walks = json.loads(DATA.read_text())
    assert list(walks) == list(WALKS)
    modules = [module for walk in walks.values() for module in walk["modules"]]
    assert [module for module in modules if not (ROOT / module).is_file()] == []


@pytest.mark.slow
@pytest.mark.parametrize("title", WALKS)
def test_a_walk_is_as_the_manual_shows_it(title: str) -> None:
    """The modules alone: numbers of calls follow the machine, as with the threads of a kernel."""
    shown = json.loads(DATA.read_text())[title]["modules"]
    if WALKS[title][0] == "triton":
        require_interpreter()
    assert list(run(*WALKS[title])["modules"]) == list(shown), "run: python -m tests.docs.walks"
