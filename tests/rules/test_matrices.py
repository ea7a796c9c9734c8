"""The rules with factored moments and matrix functions, beside implementations that are not ours."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import rulec
from rulec.compiler.matrix import takes_eigenvectors
from rulec.compiler.reference import ReferenceOptimizer
from tests.rules.matrices import MATRICES
from tests.rules.measure import Trial, largest_difference
from tests.rules.peer import Peer
from tests.rules.runs import OracleRun, OurRun, our_run

pytestmark = pytest.mark.peer

RELATIVE_FLOAT64 = 1e-12

#: More than between two refreshes of what is computed every so many steps.
STEPS = 12

#: Vectors, a number, matrices that are tall, wide and square, and batches of them.
SHAPES = ((5,), (), (6, 4), (4, 6), (5, 5), (2, 4, 3), (2, 2, 3, 3))

#: One row for what is composed.
FIRST = tuple({peer.composed: peer for peer in reversed(MATRICES)}.values())
#: Rules that keep norms or singular values of weights, and how many dimensions these have: those of zero stay.
FIXED = {"iso": (2,), "adam_hr": (2, 3, 4), "muon_hr": (2, 3, 4), "muonh": (2, 3, 4)}


@pytest.mark.each
@pytest.mark.parametrize("peer", MATRICES, ids=str)
def test_float64(peer: Peer) -> None:
    trial = Trial("float64", STEPS, SHAPES)
    ours = our_run(peer.ours(), trial.params, peer.hyper, "reference")
    theirs = peer.start(trial.params, peer.hyper)
    assert largest_difference(ours, theirs, trial, peer.hyper).relative <= RELATIVE_FLOAT64


#: Kernels of convolutions of two dimensions, of one and of three, with sides that differ; a matrix and a vector.
KERNELS = ((6, 4, 3, 3), (5, 3, 2), (7, 4), (9,), (3, 1, 2, 2, 2))


@pytest.mark.parametrize("peer", [peer for peer in MATRICES if peer.rule.endswith("_axes")], ids=str)
def test_kernels_of_convolutions(peer: Peer) -> None:
    trial = Trial("float64", STEPS, KERNELS)
    ours = our_run(peer.ours(), trial.params, peer.hyper, "reference")
    theirs = peer.start(trial.params, peer.hyper)
    assert largest_difference(ours, theirs, trial, peer.hyper).relative <= RELATIVE_FLOAT64


@pytest.mark.parametrize("peer", FIRST, ids=lambda peer: peer.composed)
def test_oracle(peer: Peer) -> None:
    """50 digits have eigenvectors where a covariance has full rank, or lacks one."""
    rule = peer.ours()
    batch = (4, 2, 2) if takes_eigenvectors(rule) else (2, 1, 2, 2)
    trial = Trial("float64", steps=5, shapes=((3,), (2, 3), (3, 2), (), batch))
    ours, oracle = (OracleRun(rule, trial.params, arithmetic, peer.hyper) for arithmetic in ("float64", "mpmath"))
    assert largest_difference(ours, oracle, trial, peer.hyper).relative <= RELATIVE_FLOAT64


@pytest.mark.parametrize("run", ["reference", "numpy"])
@pytest.mark.parametrize("peer", FIRST, ids=lambda peer: peer.composed)
def test_all_zero(peer: Peer, run: str) -> None:
    """Gradients of zero move nothing, and those that follow move everything."""
    trial = Trial("float64", steps=4, shapes=SHAPES)
    zeros = [np.zeros_like(p) for p in trial.params]
    ours = our_run(peer.ours(), zeros, peer.hyper, run)
    for _ in range(2):
        ours.step(zeros, peer.hyper)
        assert not any(p.any() for p in ours.params())
    for grads, now in trial.moves(peer.hyper):
        ours.step(grads, now)
    for p in ours.params():
        assert np.isfinite(p).all()
        assert np.abs(p).max() > 1e-3 * peer.hyper["lr"] or p.ndim in FIXED.get(peer.composed, ())


@pytest.mark.parametrize("peer", [peer for peer in MATRICES if peer.rounds], ids=str)
def test_peer_rounds(peer: Peer) -> None:
    """A remark about float32 or bfloat16 is true: as shipped the peer is off by more than we allow."""
    trial = Trial("float64", STEPS, SHAPES)
    ours = our_run(peer.ours(), trial.params, peer.hyper, "reference")
    shipped = peer.start(trial.params, peer.hyper, shipped=True)
    assert 1e-2 > largest_difference(ours, shipped, trial, peer.hyper).relative > RELATIVE_FLOAT64


@pytest.mark.parametrize("run", ["reference", "numpy", "cpu"])
def test_machine_epsilon_is_that_of_the_arrays(run: str) -> None:
    """Adafactor divides by no less than it: gradients between those of float32 and float64 show which one it is."""
    weights, grad = np.ones((3, 2)), np.full((3, 2), 1e-6) * np.arange(1, 7).reshape(3, 2)
    ours = our_run(rulec.load("adafactor"), [weights], {}, run)
    tensor = torch.tensor(weights, requires_grad=True)
    theirs = torch.optim.Adafactor([tensor])
    ours.step([grad], {})
    tensor.grad = torch.tensor(grad)
    theirs.step()
    np.testing.assert_allclose(ours.params()[0], tensor.detach().numpy(), rtol=1e-12)


@pytest.mark.parametrize("name", ["muon", "normuon"])
def test_an_embedding_goes_to_adamw(name: str) -> None:
    tags: list[set[str]] = [set(), {"embedding"}]
    optimizer = ReferenceOptimizer(rulec.load(name), [np.eye(3), np.eye(3)], tags=tags)
    optimizer.step([np.ones((3, 3)), np.ones((3, 3))])
    alone = ReferenceOptimizer(rulec.load("adamw"), [np.eye(3)], {"weight_decay": 0.1})
    alone.step([np.ones((3, 3))])
    np.testing.assert_array_equal(optimizer.params[1], alone.params[0])
    assert not np.array_equal(optimizer.params[0], alone.params[0])


@pytest.mark.parametrize(("name", "states"), [("shampoo", {"s"}), ("soap", {"m", "v"})])
def test_a_vocabulary_has_no_square_state(name: str, states: set[str]) -> None:
    optimizer = ReferenceOptimizer(rulec.load(name), [np.ones((10001, 1)), np.ones((1, 10001))])
    optimizer.step([np.ones((10001, 1)), np.ones((1, 10001))])
    assert [set(optimizer.state(i)) for i in range(2)] == [states, states]


@pytest.mark.parametrize("name", ["apollo", "apollo_mini"])
def test_states_are_small(name: str) -> None:
    """At a rank of a hundredth of the width at most 0.05 of the weights, where AdamW's are twice as large as these."""
    weights, rank = np.ones((100, 120)), {"rank": 1.0} if name == "apollo" else {}

    def share(rule: str, hyper: dict[str, float]) -> float:
        side = OurRun(rulec.load(rule), [weights], hyper, "numpy")
        side.step([weights], hyper)
        return sum(state.size for state in side.state(0).values()) / weights.size

    assert 2 * 0.01 <= share(name, rank) <= 0.05
    assert share("adamw", {}) == 2
