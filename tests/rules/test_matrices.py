"""The rules with factored moments and matrix functions, beside implementations that are not ours."""

from __future__ import annotations

import pytest

from tests.rules.matrices import MATRICES
from tests.rules.measure import Trial, largest_difference
from tests.rules.peers import Peer
from tests.rules.runs import OracleRun, OurRun, Run

pytestmark = pytest.mark.peer

#: Who runs our side: the reference, and the backends that run these rules.
RUNS = ("reference",)

RELATIVE_FLOAT64 = 1e-12

#: Vectors, a number, matrices that are tall, wide and square, and batches of them.
SHAPES = ((5,), (), (6, 4), (4, 6), (5, 5), (2, 4, 3), (2, 2, 3, 3))


def ours(peer: Peer, trial: Trial, run: str) -> Run:
    """Our side of a row, by the reference or on a backend."""
    if run == "reference":
        return OracleRun(peer.ours(), trial.params, "float64", peer.hyper)
    return OurRun(peer.ours(), trial.params, peer.hyper, run)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("peer", MATRICES, ids=str)
def test_float64(peer: Peer, run: str) -> None:
    trial = Trial("float64", shapes=SHAPES)
    theirs = peer.start(trial.params, peer.hyper)
    assert largest_difference(ours(peer, trial, run), theirs, trial, peer.hyper).relative <= RELATIVE_FLOAT64


@pytest.mark.parametrize("peer", [peer for peer in MATRICES if peer.rounds], ids=str)
def test_peer_rounds(peer: Peer) -> None:
    """A remark about float32 or bfloat16 is true: as shipped the peer is off by more than we allow."""
    trial = Trial("float64", shapes=SHAPES)
    shipped = peer.start(trial.params, peer.hyper, shipped=True)
    assert largest_difference(ours(peer, trial, "reference"), shipped, trial, peer.hyper).relative > RELATIVE_FLOAT64
