"""Every line of the manual's page of faults: their code as shipped is apart from the rule, and the rule has a peer."""

from __future__ import annotations

import pytest

from tests.docs import peers
from tests.rules.faults import CODE_FAULTS, FAULTS, Fault
from tests.rules.faults_elsewhere import ELSEWHERE, READ
from tests.rules.measure import ALL_DIMENSIONS, Trial, largest_difference
from tests.rules.runs import our_run
from tests.test_layering import ROOT

pytestmark = pytest.mark.peer

ALL = [*FAULTS, *ELSEWHERE]

#: Beyond the bound of comparisons in float64, and below what one sum in float32 leaves.
APART = 1e-10


@pytest.mark.parametrize("fault", ALL, ids=lambda fault: str(fault.peer))
def test_as_shipped_they_are_apart(fault: Fault) -> None:
    peer, trial = fault.peer, Trial("float64", shapes=ALL_DIMENSIONS)
    ours = our_run(peer.ours(), trial.params, peer.hyper, "reference")
    theirs = peer.start(trial.params, peer.hyper, shipped=True)
    assert largest_difference(ours, theirs, trial, peer.hyper).relative > APART


def test_every_rule_of_the_page_is_compared_elsewhere() -> None:
    rules = {peer.rule for peer in peers.rows() if hasattr(peer, "rule")}
    wrappers = {f"transforms/{peer.composed.partition('(')[0]}" for peer in peers.rows() if not hasattr(peer, "rule")}
    assert {fault.peer.rule for fault in ALL} <= rules | wrappers


def test_every_fault_of_code_is_shown_by_a_test() -> None:
    for fault in CODE_FAULTS:
        file, _, name = fault.test.partition(":")
        assert f"\ndef {name}(" in (ROOT / file).read_text()


def test_code_that_is_written_again_has_a_version() -> None:
    assert {fault.peer.theirs.rpartition(".")[0] for fault in ELSEWHERE} == set(READ)
