"""Where schedule-free rules are evaluated, beside `eval()` of theirs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import rulec
from rulec.compiler.pipeline import compile
from rulec.compiler.scalars import evaluate_once
from tests.rules.measure import ALL_DIMENSIONS, Trial
from tests.rules.reducing import REDUCING
from tests.rules.runs import OracleRun, TorchRun

pytestmark = pytest.mark.peer


@pytest.mark.parametrize("name", ["schedule_free_sgd", "schedule_free_adamw"])
def test_average(name: str) -> None:
    peer = next(row for row in REDUCING if row.composed == name)
    trial = Trial("float64", shapes=ALL_DIMENSIONS)
    ours = OracleRun(rulec.load(name), trial.params, "float64", peer.hyper)
    theirs: Any = peer.start(trial.params, peer.hyper)
    assert isinstance(theirs, TorchRun)
    theirs.optimizer.train()
    for grads, now in trial.moves(peer.hyper):
        ours.step(grads, now)
        theirs.step(grads, now)
    theirs.optimizer.eval()
    point = compile(rulec.load(name)).evaluate
    assert point is not None
    for index, (p, expected) in enumerate(zip(ours.params(), theirs.params(), strict=True)):
        here = evaluate_once(point, peer.hyper, {}, {"p": p, "z": ours.state(index)["z"]})
        np.testing.assert_allclose(here, expected, rtol=1e-12, atol=1e-14)
        assert (abs(here - p) > 1e-6).all()
