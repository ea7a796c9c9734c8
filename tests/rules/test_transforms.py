"""What transforms do that no step of an ordinary trial shows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from pytorch_optimizer.optimizer.agc import agc

import rulec
from rulec.compiler.reference import ReferenceOptimizer
from tests.rules.measure import ALL_DIMENSIONS, Trial, largest_difference
from tests.rules.printed import CautiousAdamW
from tests.rules.reducing import REDUCING, finite_adam
from tests.rules.runs import OptaxRun, TorchRun, our_run

pytestmark = pytest.mark.peer

#: Who runs our side: the reference, and a backend.
RUNS = ("reference", "numpy")


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_one_bad_number_skips_the_step_of_all(run: str, bad: float) -> None:
    """As if the step had never been: optax counts neither it nor its gradients."""
    hyper = {"lr": 0.03, "beta1": 0.8, "beta2": 0.95, "eps": 1e-6}
    trial = Trial("float64", shapes=ALL_DIMENSIONS)
    rule = rulec.load("skip_not_finite") >> rulec.load("adam")
    ours = our_run(rule, trial.params, hyper, run)
    theirs = OptaxRun(finite_adam, trial.params, hyper)
    for k, (grads, now) in enumerate(trial.moves(hyper)):
        before = ours.params()
        if k % 4 == 1:
            grads[k % len(grads)].reshape(-1)[0] = bad
        ours.step(grads, now)
        theirs.step(grads, now)
        for a, b, old in zip(ours.params(), theirs.params(), before, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14)
            assert k % 4 != 1 or (a == old).all()


@pytest.mark.parametrize("run", RUNS)
def test_units_of_torch(run: str) -> None:
    """pytorch_optimizer has the same units but for tensors of three dimensions."""

    def clip(optimizer: Any, *_: Any) -> None:
        for p in optimizer.param_groups[0]["params"]:
            p.grad = agc(p, p.grad, 0.01, 0.3)

    hyper = {"lr": 0.05, "clipping": 0.3, "min_norm": 0.01}
    trial = Trial("float64", shapes=tuple(shape for shape in ALL_DIMENSIONS if len(shape) != 3))
    ours = our_run(rulec.load("adaptive_clip") >> rulec.load("sgd"), trial.params, hyper, run)
    theirs = TorchRun(
        torch.optim.SGD, lambda h: {"lr": h["lr"]}, trial.params, hyper,
        prepare=lambda optimizer: optimizer.register_step_pre_hook(clip),
    )  # fmt: skip
    assert largest_difference(ours, theirs, trial, hyper).relative <= 1e-12


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("shape", [(30000,), (60, 500), (10, 30, 100), (5, 6, 10, 100)])
def test_noise_is_normal_and_falls(run: str, shape: tuple[int, ...]) -> None:
    """Moments within four standard errors of what Gaussian numbers of the annealed variance have."""
    hyper = {"lr": 1.0, "noise_eta": 0.3, "noise_gamma": 0.6}
    ours = our_run(rulec.load("noise") >> rulec.load("sgd"), [np.zeros(shape)], hyper, run)
    drawn = []
    for t in range(1, 4):
        before = ours.params()[0]
        ours.step([np.zeros(shape)], hyper)
        drawn.append((before - ours.params()[0]).reshape(-1) / np.sqrt(0.3 / t**0.6))
    count = drawn[0].size
    for x in drawn:
        assert abs(x.mean()) < 4 / np.sqrt(count)
        assert abs((x**2).mean() - 1) < 4 * np.sqrt(2 / count)
        assert abs((x**4).mean() - 3) < 4 * np.sqrt(96 / count)
    # No two elements are drawn together: neighbours, rows and steps have nothing in common.
    pairs = [(drawn[0][:-lag], drawn[0][lag:]) for lag in (1, shape[-1], count // 3)] + [(drawn[0], drawn[1])]
    for a, b in pairs:
        if a.size:
            assert abs((a * b).mean()) < 4 / np.sqrt(a.size)


def test_noise_differs_by_tensor_and_seed() -> None:
    rule = rulec.load("noise") >> rulec.load("sgd")
    runs = [ReferenceOptimizer(rule, [np.zeros(9), np.zeros(9)], seed=seed) for seed in (0, 0, 1)]
    for run in runs:
        run.step([np.zeros(9), np.zeros(9)])
    one, again, other = (run.params for run in runs)
    np.testing.assert_array_equal(one, again)
    assert (one[0] != one[1]).all()
    assert (one[0] != other[0]).all()


@pytest.mark.parametrize("run", RUNS)
def test_caution_where_almost_nothing_agrees(run: str) -> None:
    """One element of 5000 is less than the bound: it moves a thousand times as far, not five thousand times."""
    hyper = {"lr": 0.01, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0}
    first, second = np.ones(5000), np.full(5000, -0.1)
    second[7] = 1
    ours = our_run(rulec.load("cautious_adamw"), [np.ones(5000)], hyper, run)
    theirs = CautiousAdamW([np.ones(5000)])
    for grad in (first, second):
        ours.step([grad], hyper)
        theirs.step([grad], hyper)
    np.testing.assert_allclose(ours.params()[0], theirs.params()[0], rtol=1e-12)
    moved = np.flatnonzero(ours.params()[0] != ours.params()[0][0])
    assert moved.tolist() == [7]


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("name", ["schedule_free_sgd", "schedule_free_adamw"])
def test_schedule_that_begins_at_zero(run: str, name: str) -> None:
    """No step has any weight yet: the average stays where it is."""
    peer = next(row for row in REDUCING if row.composed == name)
    trial = Trial("float64", steps=6)
    ours = our_run(rulec.load(name), trial.params, peer.hyper, run)
    theirs = peer.start(trial.params, peer.hyper)
    for k, (grads, now) in enumerate(trial.moves(peer.hyper)):
        for side in (ours, theirs):
            side.step(grads, {**now, "lr": 0.0 if k < 2 else now["lr"]})
        for a, b in zip(ours.params(), theirs.params(), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14)
