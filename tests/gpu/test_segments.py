"""The reduction of runs of a vector on a GPU."""

from __future__ import annotations

import pytest

from tests.backends.segments import depends_on_neighbours, wrong

pytestmark = pytest.mark.gpu


def test_runs_are_reduced_each_to_its_own_number() -> None:
    assert wrong("cuda") == []


def test_a_run_has_the_same_bits_whatever_its_neighbours_are() -> None:
    assert depends_on_neighbours("cuda") == []
