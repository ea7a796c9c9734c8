"""Where schedule-free rules are evaluated, beside `eval()` of theirs, and the way back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import rulec
from tests.rules.measure import ALL_DIMENSIONS, Trial
from tests.rules.reducing import REDUCING
from tests.rules.runs import OurRun, TorchRun

pytestmark = pytest.mark.peer


@pytest.mark.parametrize("name", ["schedule_free_sgd", "schedule_free_adamw"])
def test_average(name: str) -> None:
    peer = next(row for row in REDUCING if row.composed == name)
    trial = Trial("float64", steps=12, shapes=ALL_DIMENSIONS)
    ours = OurRun(rulec.load(name), trial.params, peer.hyper, "numpy")
    theirs: Any = peer.start(trial.params, peer.hyper)
    assert isinstance(theirs, TorchRun)
    theirs.optimizer.train()
    for grads, now in trial.moves(peer.hyper):
        ours.step(grads, now)
        theirs.step(grads, now)
    trained = ours.params()
    ours.optimizer.eval()
    theirs.optimizer.eval()
    for here, there, p in zip(ours.params(), theirs.params(), trained, strict=True):
        np.testing.assert_allclose(here, there, rtol=1e-12, atol=1e-14)
        assert (abs(here - p) > 1e-6).all()
    ours.optimizer.train()
    for back, p in zip(ours.params(), trained, strict=True):
        np.testing.assert_allclose(back, p, rtol=1e-13, atol=1e-14)
