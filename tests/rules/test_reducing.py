"""The rules that reduce, beside implementations that are not ours, also where norms are zero."""

from __future__ import annotations

import numpy as np
import pytest

import rulec
from tests.rules.measure import ALL_DIMENSIONS, STEPS, Trial, against_reference, largest_difference
from tests.rules.peer import Peer
from tests.rules.reducing import REDUCING
from tests.rules.runs import OracleRun, OurRun, our_run
from tests.rules.trials import Drifting, SomeZero

pytestmark = pytest.mark.peer

#: The trials of each row, and their steps.
TRIALS = {Trial: STEPS, SomeZero: 12, Drifting: 12}

RELATIVE_FLOAT64 = 1e-12

#: Half an ulp a step, as for the elementwise rules.
ULPS_FLOAT32 = STEPS / 2

#: Rules whose first gradients, or norms of parameters, set their step for good: a tensor whose are zero stays.
SET_AT_FIRST = ("sgdsai", "hyperball_adam", "madam", "transforms/relative_update", "transforms/percentile_clip")

#: Rules that move a tensor without a gradient.
MOVED_BY_NOISE = ("transforms/noise", "gravity", "sgld", "psgld", "sghmc")

#: Rules that divide by differences of parameters, whose rounding grows from step to step. `test_lbfgs` has them in
#: float32 on a function.
OF_DIFFERENCES = ("lbfgs_direction",)

#: One row for what is composed.
FIRST = tuple({peer.composed: peer for peer in reversed(REDUCING)}.values())


@pytest.mark.each
@pytest.mark.parametrize("peer", REDUCING, ids=str)
def test_float64(peer: Peer) -> None:
    for trial in (kind("float64", steps, ALL_DIMENSIONS) for kind, steps in TRIALS.items()):
        ours = our_run(peer.ours(), trial.params, peer.hyper, "reference")
        theirs = peer.start(trial.params, peer.hyper)
        assert largest_difference(ours, theirs, trial, peer.hyper).relative <= RELATIVE_FLOAT64, trial


@pytest.mark.parametrize("peer", [p for p in FIRST if p.rule not in OF_DIFFERENCES], ids=lambda peer: peer.composed)
def test_float32(peer: Peer) -> None:
    """In parts of the largest element: what a sum rounds reaches every element."""
    found = against_reference(peer, Trial("float32", shapes=ALL_DIMENSIONS))
    assert found.relative <= ULPS_FLOAT32 * np.finfo("float32").eps


@pytest.mark.parametrize("peer", FIRST, ids=lambda peer: peer.composed)
def test_oracle(peer: Peer) -> None:
    trial = Trial("float64", steps=5, shapes=((3,), (2, 3), (), (2, 1, 2, 2)))
    rule = peer.ours()
    ours, oracle = (OracleRun(rule, trial.params, arithmetic, peer.hyper) for arithmetic in ("float64", "mpmath"))
    assert largest_difference(ours, oracle, trial, peer.hyper).relative <= RELATIVE_FLOAT64


@pytest.mark.parametrize("run", ["reference", "numpy"])
@pytest.mark.parametrize("peer", FIRST, ids=lambda peer: peer.composed)
def test_all_zero(peer: Peer, run: str) -> None:
    """No norm to divide by anywhere: nothing but noise moves, and then everything that has a gradient does."""
    trial = Trial("float64", steps=4, shapes=ALL_DIMENSIONS)
    zeros = [np.zeros_like(p) for p in trial.params]
    ours = our_run(peer.ours(), zeros, peer.hyper, run)
    for _ in range(2):
        ours.step(zeros, peer.hyper)
        assert all((p == 0).all() for p in ours.params()) or peer.rule in MOVED_BY_NOISE
    for grads, now in trial.moves(peer.hyper):
        ours.step(grads, now)
    for p in ours.params():
        assert np.isfinite(p).all()
        assert p.any() != (peer.rule in SET_AT_FIRST and (p.ndim > 1 or peer.rule != "hyperball_adam"))


def test_matrices_of_a_long_side_have_a_factored_moment() -> None:
    peer = next(row for row in REDUCING if row.composed == "prodigy_schedule_free")
    trial = Trial("float64", shapes=((32, 3), (3, 32), (3, 31), (33,)))
    ours = OracleRun(peer.ours(), trial.params, "float64", peer.hyper)
    assert (
        largest_difference(ours, peer.start(trial.params, peer.hyper), trial, peer.hyper).relative <= RELATIVE_FLOAT64
    )
    assert [sorted({"v", "r", "c"} & set(ours.optimizer.state(i))) for i in range(4)] == [["c", "r"]] * 2 + [["v"]] * 2


@pytest.mark.parametrize("name", ["prodigy", "dadapt_adam", "prodigy_schedule_free"])
def test_distance_stays_without_gradients(name: str) -> None:
    ours = OurRun(rulec.load(name), [np.ones(3), np.ones((2, 2))], {"d0": 0.02}, "numpy")
    for _ in range(3):
        ours.step([np.zeros(3), np.zeros((2, 2))], {})
    assert ours.state(0)["d"] == 0.02
    assert (ours.params()[1] == 1).all()
