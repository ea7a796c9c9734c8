"""The rules that reduce, beside implementations that are not ours, also where norms are zero."""

from __future__ import annotations

import numpy as np
import pytest

import rulec
from tests.rules.measure import ALL_DIMENSIONS, STEPS, Trial, largest_difference
from tests.rules.peers import Peer
from tests.rules.reducing import REDUCING
from tests.rules.runs import OracleRun, OurRun, our_run
from tests.rules.trials import Drifting, SomeZero

pytestmark = pytest.mark.peer

#: Who runs our side: the reference, and the backends that run these rules.
RUNS = ("reference", "numpy", "cpu")

RELATIVE_FLOAT64 = 1e-12

#: Half an ulp a step, as for the elementwise rules.
ULPS_FLOAT32 = STEPS / 2

#: One row for what is composed.
FIRST = tuple({peer.composed: peer for peer in reversed(REDUCING)}.values())


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("kind", [Trial, SomeZero, Drifting])
@pytest.mark.parametrize("peer", REDUCING, ids=str)
def test_float64(peer: Peer, kind: type[Trial], run: str) -> None:
    trial = kind("float64", shapes=ALL_DIMENSIONS)
    ours = our_run(peer.ours(), trial.params, peer.hyper, run)
    theirs = peer.start(trial.params, peer.hyper)
    assert largest_difference(ours, theirs, trial, peer.hyper).relative <= RELATIVE_FLOAT64


@pytest.mark.parametrize("backend", RUNS[1:])
@pytest.mark.parametrize("peer", REDUCING, ids=str)
def test_float32(peer: Peer, backend: str) -> None:
    trial = Trial("float32", shapes=ALL_DIMENSIONS)
    ours = our_run(peer.ours(), trial.params, peer.hyper, backend)
    theirs = peer.start(trial.params, peer.hyper)
    assert largest_difference(ours, theirs, trial, peer.hyper).ulps <= ULPS_FLOAT32


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("peer", FIRST, ids=lambda peer: peer.composed)
def test_oracle(peer: Peer, run: str) -> None:
    trial = Trial("float64", steps=5, shapes=((3,), (2, 3), (), (2, 1, 2, 2)))
    ours = our_run(peer.ours(), trial.params, peer.hyper, run)
    oracle = OracleRun(peer.ours(), trial.params, "mpmath", peer.hyper)
    assert largest_difference(ours, oracle, trial, peer.hyper).relative <= RELATIVE_FLOAT64


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("peer", FIRST, ids=lambda peer: peer.composed)
def test_all_zero(peer: Peer, run: str) -> None:
    """No norm to divide by anywhere: nothing but noise moves, and then everything that has a gradient does."""
    trial = Trial("float64", steps=4, shapes=ALL_DIMENSIONS)
    zeros = [np.zeros_like(p) for p in trial.params]
    ours = our_run(peer.ours(), zeros, peer.hyper, run)
    for _ in range(2):
        ours.step(zeros, peer.hyper)
        assert all((p == 0).all() for p in ours.params()) or "noise" in peer.composed
    for grads, now in trial.moves(peer.hyper):
        ours.step(grads, now)
    for p in ours.params():
        assert np.isfinite(p).all()
        assert p.any()


@pytest.mark.parametrize("backend", RUNS[1:])
@pytest.mark.parametrize("name", ["prodigy", "dadapt_adam"])
def test_distance_stays_without_gradients(name: str, backend: str) -> None:
    ours = OurRun(rulec.load(name), [np.ones(3), np.ones((2, 2))], {"d0": 0.02}, backend)
    for _ in range(3):
        ours.step([np.zeros(3), np.zeros((2, 2))], {})
    assert ours.state(0)["d"] == 0.02
    assert (ours.params()[1] == 1).all()
