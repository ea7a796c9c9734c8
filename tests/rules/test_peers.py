"""Every rule beside an implementation that is not ours, and beside the 50-digit oracle."""

from __future__ import annotations

import pytest

import rulec
from tests.rules.matrices import MATRICES
from tests.rules.measure import STEPS, Trial, against_peer, largest_difference
from tests.rules.peers import FIRST, PEERS, Peer
from tests.rules.reducing import REDUCING
from tests.rules.runs import OracleRun, OurRun

pytestmark = pytest.mark.peer

RELATIVE_FLOAT64 = 1e-12

#: Half an ulp a step: what rounding the parameter once a step costs at most. Theirs often rounds it two or three
#: times, and both round the rest of the step too, but signs of rounding errors are as good as random.
ULPS_FLOAT32 = STEPS / 2


def test_every_rule_has_a_peer() -> None:
    library = set(rulec.rules(wrappers=False))
    named = {
        name if name in library else f"transforms/{name}"
        for row in (*PEERS, *REDUCING, *MATRICES)
        for name in row.names
    }
    assert named == library


@pytest.mark.parametrize("peer", PEERS, ids=str)
def test_float64(peer: Peer) -> None:
    assert against_peer(peer, "float64", "numpy").relative <= RELATIVE_FLOAT64


@pytest.mark.parametrize("peer", PEERS, ids=str)
def test_float32(peer: Peer) -> None:
    assert against_peer(peer, "float32", "numpy").ulps <= ULPS_FLOAT32


@pytest.mark.parametrize("peer", FIRST, ids=str)
def test_float64_compiled(peer: Peer) -> None:
    assert against_peer(peer, "float64", "cpu").relative <= RELATIVE_FLOAT64


@pytest.mark.parametrize("peer", FIRST, ids=str)
def test_float32_compiled(peer: Peer) -> None:
    assert against_peer(peer, "float32", "cpu").ulps <= ULPS_FLOAT32


@pytest.mark.parametrize("peer", FIRST, ids=str)
def test_float64_oracle(peer: Peer) -> None:
    trial = Trial("float64")
    rule = peer.ours()
    ours = OurRun(rule, trial.params, peer.hyper, "numpy")
    oracle = OracleRun(rule, trial.params)
    assert largest_difference(ours, oracle, trial, peer.hyper).relative <= RELATIVE_FLOAT64


@pytest.mark.parametrize("peer", FIRST, ids=str)
def test_float32_oracle(peer: Peer) -> None:
    trial = Trial("float32")
    rule = peer.ours()
    ours = OurRun(rule, trial.params, peer.hyper, "cpu")
    oracle = OracleRun(rule, trial.params, "float64")
    assert largest_difference(ours, oracle, trial, peer.hyper).ulps <= ULPS_FLOAT32


@pytest.mark.parametrize("peer", [peer for peer in PEERS if peer.rounds], ids=str)
def test_peer_rounds(peer: Peer) -> None:
    """A remark about float32 scalars is true: with them the peer is off by more than we allow, without them not."""
    shipped = against_peer(peer, "float64", "numpy", shipped=True).relative
    assert RELATIVE_FLOAT64 < shipped < 1e-6
