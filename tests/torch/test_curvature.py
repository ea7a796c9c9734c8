"""Diagonals of the Hessian, and rules of the diagonal, compared with pytorch_optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import pytorch_optimizer
import torch

import rulec
import rulec.torch
from rulec.errors import HyperError, TensorError

SOPHIA = """
name: SophiaH
hyper: {beta1: 0.965, beta2: 0.99, eps: 1e-12, limit: 0.01, k: {default: 10, whole: true, min: 1}}
state: {m: 0, h: 0}
inputs: {hessian: like p}
step: |
  m = beta1*m + (1 - beta1)*g
  if (t - 1) % k == 0:
    h = beta2*h + (1 - beta2)*hessian
  direction = clip(m/maximum(h, eps), -limit, limit)
"""

ADAHESSIAN = """
name: DiagonalAdam
hyper: {beta1: 0.9, beta2: 0.999, eps: 1e-8, power: 1.0, k: {default: 1, whole: true, min: 1}}
state: {m: 0, v: 0}
inputs: {hessian: like p}
step: |
  m = beta1*m + (1 - beta1)*g
  if (t - 1) % k == 0:
    v = beta2*v + (1 - beta2)*hessian*hessian
  direction = m/(1 - beta1**t)/((v/(1 - beta2**t))**(power/2) + eps)
"""


def parameters() -> list[Any]:
    rng = np.random.default_rng(0)
    return [torch.nn.Parameter(torch.tensor(rng.normal(size=shape))) for shape in ((3, 4), (5,))]


def quartic(params: list[Any]) -> Any:
    """A loss whose Hessian is diagonal: 12 p**2."""
    return sum((p**4).sum() for p in params)


def test_signs_give_the_diagonal_where_there_is_nothing_else() -> None:
    params = parameters()
    loss = quartic(params)
    diagonal = rulec.torch.hutchinson(params, loss)
    for param in params:
        torch.testing.assert_close(diagonal[param], 12 * param.detach() ** 2, rtol=1e-14, atol=1e-14)
        assert not diagonal[param].requires_grad
    loss.backward()  # its graph is still there
    assert all(p.grad is not None for p in params)


@pytest.mark.parametrize("draws", ["rademacher", "normal"])
def test_many_samples_come_near_the_diagonal(draws: str) -> None:
    torch.manual_seed(0)
    matrix = torch.randn(6, 6, dtype=torch.float64)
    x = torch.nn.Parameter(torch.randn(6, dtype=torch.float64))
    loss = (matrix @ x).square().sum() / 2
    exact = (matrix.T @ matrix).diagonal()
    estimate = rulec.torch.hutchinson([x], loss, samples=3000, draws=draws)[x]
    assert float((estimate - exact).abs().max() / exact.max()) < 0.15


def test_what_the_loss_does_not_depend_on_twice_has_zeros() -> None:
    a, b, c = (torch.nn.Parameter(torch.ones(2)) for _ in range(3))
    diagonal = rulec.torch.hutchinson([a, b, c], (a**2).sum() + 3 * b.sum())
    assert [diagonal[p].tolist() for p in (a, b, c)] == [[2.0, 2.0], [0.0, 0.0], [0.0, 0.0]]


def test_mistakes_have_one_sentence() -> None:
    model = torch.nn.Linear(2, 1)
    loss = model(torch.ones(1, 2)).square().sum()
    with pytest.raises(HyperError, match="draws='signs' of hutchinson is none of rademacher, normal"):
        rulec.torch.hutchinson(model, loss, draws="signs")
    with pytest.raises(HyperError, match="samples=0 of hutchinson must be a whole number from 1 on"):
        rulec.torch.hutchinson(model, loss, samples=0)
    with pytest.raises(TensorError, match="one number with a graph, before backward"):
        rulec.torch.hutchinson(model, loss.detach())
    with pytest.raises(TensorError, match="hutchinson takes a module or tensors, not dict"):
        rulec.torch.hutchinson({"a": 1}, loss)


def peer_of(kind: Any, **keywords: Any) -> Callable[[list[Any]], Any]:
    return lambda params: kind(params, weight_decay=0.0, foreach=False, **keywords)


@pytest.mark.parametrize(
    ("text", "hyper", "peer"),
    [
        (SOPHIA, {"lr": 0.06, "k": 3}, peer_of(pytorch_optimizer.SophiaH, lr=0.06, update_period=3)),
        (ADAHESSIAN, {"lr": 0.1, "k": 1}, peer_of(pytorch_optimizer.AdaHessian, lr=0.1, eps=1e-8)),
    ],
    ids=["sophia", "adahessian"],
)
def test_rules_of_the_diagonal_agree_with_pytorch_optimizer(text: str, hyper: dict[str, Any], peer: Any) -> None:
    ours, theirs = parameters(), parameters()
    mine, other = rulec.torch.optimizer(rulec.parse(text))(ours, **hyper), peer(theirs)
    asked = 0
    for t in range(10):
        for optimizer, params in ((mine, ours), (other, theirs)):
            optimizer.zero_grad()
            quartic(params).backward()
        reads = t % hyper["k"] == 0
        asked += reads
        mine.step(inputs={"hessian": rulec.torch.hutchinson(ours, quartic(ours))} if reads else None)
        other.step(hessian=[12 * p.detach() ** 2 for p in theirs] if reads else None) if reads else _between(other)
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    assert asked == {3: 4, 1: 10}[hyper["k"]]


def _between(optimizer: Any) -> None:
    """A step of theirs in which the diagonal stays."""
    assert (optimizer.param_groups[0]["step"]) % optimizer.update_period
    optimizer.step()


def test_a_diagonal_is_asked_for_in_the_steps_that_read_it() -> None:
    params = parameters()
    optimizer = rulec.torch.optimizer(rulec.parse(SOPHIA))(params, k=2)
    quartic(params).backward()
    with pytest.raises(TensorError, match="SophiaH needs the input 'hessian' in this step"):
        optimizer.step()
    optimizer.step(inputs={"hessian": rulec.torch.hutchinson(params, quartic(params))})
    optimizer.step()
    with pytest.raises(TensorError, match="SophiaH needs the input 'hessian' in this step"):
        optimizer.step()
