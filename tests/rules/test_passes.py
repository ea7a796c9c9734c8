"""Every wrapper with passes beside an implementation that is not ours, in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import pytorch_optimizer
import torch

import rulec
from rulec.compiler.reference import ReferenceOptimizer
from tests.rules.passes import PASSES, PassPeer, gradient_of, start

pytestmark = pytest.mark.peer


def test_every_rule_with_passes_has_a_peer() -> None:
    named = {row.composed.partition("(")[0] for row in PASSES}
    assert named == {name.removeprefix("transforms/") for name in rulec.rules() if rulec.load(name).passes}


@pytest.mark.each
@pytest.mark.parametrize("row", PASSES, ids=str)
def test_agrees_with_its_peer(row: PassPeer) -> None:
    ours, theirs = ReferenceOptimizer(rulec.load(row.composed), start(), dict(row.hyper)), row.make(row.hyper)
    gradient, largest = gradient_of(), 0.0
    for _ in range(25):
        ours.step(gradient(ours.params), gradient=gradient)
        theirs.step()
        for a, b in zip(ours.params, theirs.params(), strict=True):
            largest = max(largest, float(np.max(np.abs(a - b)) / np.max(np.abs(b))))
    assert largest < 1e-12
    assert any(np.abs(a - b).max() > 0.1 for a, b in zip(ours.params, start(), strict=True))


def test_the_climb_decides_what_weights_decay() -> None:
    """Decay of the point that was climbed to, as by a wrapper of gradients alone, is off by far more than rounding."""
    hyper = {"lr": 0.02, "weight_decay": 0.1, "rho": 0.1}
    naive = rulec.parse("""
name: Naive
wraps: inner
hyper: {rho: 0.1}
passes: {climb: 'p + g*(rho/norm(g, per="model"))'}
step: |
  inner(climb.g, p=p + g*(rho/norm(g, per="model")))
  p = p + (inner.p - (p + g*(rho/norm(g, per="model"))))
""")
    gradient = gradient_of()
    right, wrong = (
        ReferenceOptimizer(rule, start(), hyper) for rule in (rulec.load("sam(adamw)"), naive(rulec.load("adamw")))
    )
    right.step(gradient(right.params), gradient=gradient)
    wrong.step(gradient(wrong.params), gradient=gradient)
    off = max(float(np.abs(a - b).max()) for a, b in zip(right.params, wrong.params, strict=True))
    assert 1e-6 < off < 1e-3


def test_bsam_of_pytorch_optimizer_climbs() -> None:
    """It leaves weights where it climbed to, and steps by a share of the gradient as small as the weight decay."""
    weights, hyper = [np.full(3, 2.0)], {"lr": 0.1, "beta1": 0.0, "beta2": 0.9, "weight_decay": 0.01, "rho": 0.2}
    ours = ReferenceOptimizer(rulec.load("bsam"), weights, {**hyper, "num_data": 1e18})
    param = torch.nn.Parameter(torch.tensor(weights[0]))
    keywords = {key: hyper[key] for key in ("lr", "weight_decay", "rho")}
    theirs: Any = pytorch_optimizer.BSAM([param], num_data=10**18, betas=(0.0, 0.9), **keywords)

    def closure() -> torch.Tensor:
        param.grad = param.detach().clone()
        return torch.zeros(())

    closure()
    for _ in range(5):
        ours.step([p.copy() for p in ours.params], gradient=lambda points: [p.copy() for p in points])
        theirs.step(closure)
    assert (ours.params[0] < 1.2).all()
    assert (param.detach().numpy() > 3).all()
