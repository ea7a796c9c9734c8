"""Every rule beside an implementation that is not ours, and beside the 50-digit oracle."""

from __future__ import annotations

import pytest

import rulec
from tests.rules.measure import Trial, against_peer, largest_difference
from tests.rules.peers import FIRST, PEERS, Peer
from tests.rules.runs import OracleRun, OurRun

pytestmark = pytest.mark.peer

RELATIVE_FLOAT64 = 1e-12

#: Ours rounds the parameter once a step, by half an ulp at most, and theirs up to three times. Over 25 steps these
#: random signs add up to 3 ulp of standard deviation; 12 is four times that, for 20 elements of 50 rows.
ULPS_FLOAT32 = 12


def test_every_rule_has_a_peer() -> None:
    named = {name if name in rulec.rules() else f"transforms/{name}" for peer in PEERS for name in peer.names}
    assert named == set(rulec.rules())


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


@pytest.mark.parametrize("peer", [peer for peer in PEERS if peer.rounds], ids=str)
def test_peer_rounds(peer: Peer) -> None:
    """A remark about float32 scalars is true: with them the peer is off by more than we allow, without them not."""
    shipped = against_peer(peer, "float64", "numpy", shipped=True).relative
    assert RELATIVE_FLOAT64 < shipped < 1e-6
