"""Mechanic where the way from the start grows and where norms are zero."""

from __future__ import annotations

import pytest

import rulec
from tests.rules.measure import ALL_DIMENSIONS, Trial, largest_difference
from tests.rules.runs import our_run
from tests.rules.trials import Drifting, SomeZero
from tests.rules.wrappers import WRAPPERS

pytestmark = pytest.mark.peer

ROW = next(row for row in WRAPPERS if row.composed.startswith("mechanic"))


@pytest.mark.parametrize(("kind", "run"), [(SomeZero, "reference"), (Drifting, "reference"), (Drifting, "numpy")])
def test_float64(kind: type[Trial], run: str) -> None:
    trial = kind("float64", shapes=ALL_DIMENSIONS)
    ours = our_run(rulec.load(ROW.composed), trial.params, ROW.hyper, run)
    assert largest_difference(ours, ROW.start(trial.params, ROW.hyper), trial, ROW.hyper).relative <= 1e-12
