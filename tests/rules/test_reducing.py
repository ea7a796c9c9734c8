"""The rules that reduce, beside implementations that are not ours."""

from __future__ import annotations

import pytest

from tests.rules.measure import ALL_DIMENSIONS, Trial, largest_difference
from tests.rules.peers import Peer
from tests.rules.reducing import REDUCING
from tests.rules.runs import our_run

pytestmark = pytest.mark.peer

#: Who runs our side: the reference, and the backends that run these rules.
RUNS = ("reference",)

RELATIVE_FLOAT64 = 1e-12


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("peer", REDUCING, ids=str)
def test_float64(peer: Peer, run: str) -> None:
    trial = Trial("float64", shapes=ALL_DIMENSIONS)
    ours = our_run(peer.ours(), trial.params, peer.hyper, run)
    theirs = peer.start(trial.params, peer.hyper)
    assert largest_difference(ours, theirs, trial, peer.hyper).relative <= RELATIVE_FLOAT64
