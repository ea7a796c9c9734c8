"""Every rule by the reference beside an implementation that is not ours, and the reference beside the 50-digit oracle.

Backends are compared with the reference, rule by rule, in tests/backends.
"""

from __future__ import annotations

import pytest

import rulec
from tests.rules.matrices import MATRICES
from tests.rules.measure import STEPS, Trial, against_peer, against_reference, largest_difference
from tests.rules.peer import Peer
from tests.rules.peers import FIRST, PEERS
from tests.rules.reducing import REDUCING
from tests.rules.runs import OracleRun

pytestmark = pytest.mark.peer

RELATIVE_FLOAT64 = 1e-12

#: Half an ulp a step: what rounding the parameter once a step costs at most. Theirs often rounds it two or three
#: times, and both round the rest of the step too, but signs of rounding errors are as good as random.
ULPS_FLOAT32 = STEPS / 2


def test_every_rule_has_a_peer() -> None:
    """Those with inputs have theirs in test_inputs.py, and those with passes in test_passes.py."""
    rules = {name: rulec.load(name) for name in rulec.rules(wrappers=False)}
    library = {name for name, rule in rules.items() if not rule.inputs and not rule.passes}
    named = {
        name if name in library else f"transforms/{name}"
        for row in (*PEERS, *REDUCING, *MATRICES)
        for name in row.names
    }
    assert named == library


@pytest.mark.each
@pytest.mark.parametrize("peer", PEERS, ids=str)
def test_float64(peer: Peer) -> None:
    assert against_peer(peer, "float64", "reference").relative <= RELATIVE_FLOAT64


@pytest.mark.parametrize("peer", FIRST, ids=str)
def test_float32(peer: Peer) -> None:
    assert against_reference(peer, Trial("float32")).ulps <= ULPS_FLOAT32


@pytest.mark.parametrize("peer", FIRST, ids=str)
def test_oracle(peer: Peer) -> None:
    trial = Trial("float64", steps=10, shapes=((4,), ()))
    rule = peer.ours()
    ours, oracle = (OracleRun(rule, trial.params, arithmetic) for arithmetic in ("float64", "mpmath"))
    assert largest_difference(ours, oracle, trial, peer.hyper).relative <= RELATIVE_FLOAT64


@pytest.mark.parametrize("peer", [peer for peer in PEERS if peer.rounds], ids=str)
def test_peer_rounds(peer: Peer) -> None:
    """A remark about float32 scalars is true: with them the peer is off by more than we allow, without them not."""
    shipped = against_peer(peer, "float64", "reference", shipped=True).relative
    assert RELATIVE_FLOAT64 < shipped < 1e-6
