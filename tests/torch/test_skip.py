"""Steps that the rule's own condition leaves out."""

from __future__ import annotations

import warnings

import pytest
import torch

import rulec
import rulec.torch
from tests.torch.test_rules import advance
from tests.torch.twins import difference, give_gradients, parameters

GUARDED = rulec.load("skip_not_finite") >> rulec.load("adamw")
BY_TENSOR = """
name: Wary
state: {m: 0}
skip: count_nonzero(not isfinite(g)) > 0
step: |
  m = 0.5*m + g
  direction = m
"""


def test_a_nan_in_one_tensor_skips_the_whole_step() -> None:
    params, straight = parameters(), parameters()
    groups = [{"params": params[:2]}, {"params": params[2:], "lr": 0.02}]
    optimizer = rulec.torch.optimizer(GUARDED)(groups, lr=0.1)
    advance(optimizer, params, range(2))
    kept = [p.detach().clone() for p in params]
    states = [{k: v.clone() for k, v in optimizer.state[p].items()} for p in params]
    versions = [p._version for p in params]
    give_gradients(params, 2)
    params[1].grad[0, 0] = torch.nan  # type: ignore[index]
    with pytest.warns(RuntimeWarning, match="SkipNotFiniteThenAdamW skipped the step of .*parameter 3"):
        optimizer.step()
    assert optimizer.skipped_steps == 1
    assert difference(params, kept) == 0
    assert [p._version for p in params] == versions
    for p, before in zip(params, states, strict=True):
        assert all(torch.equal(value, before[key]) for key, value in optimizer.state[p].items())
    advance(optimizer, params, range(2, 4))
    other = rulec.torch.AdamW([{"params": straight[:2]}, {"params": straight[2:], "lr": 0.02}], lr=0.1)
    advance(other, straight, range(4))
    assert difference(params, straight) <= 4
    assert (optimizer.skipped_steps, other.skipped_steps) == (1, 0)


def test_a_tensor_may_be_skipped_by_itself() -> None:
    params = parameters()
    optimizer = rulec.torch.optimizer(rulec.parse(BY_TENSOR))(params, lr=0.1)
    advance(optimizer, params, range(1))
    kept, versions = [p.detach().clone() for p in params], [p._version for p in params]
    give_gradients(params, 1)
    params[0].grad[3] = torch.inf  # type: ignore[index]
    with pytest.warns(RuntimeWarning, match="Wary skipped the step of parameter 0: "):
        optimizer.step()
    assert torch.equal(params[0].detach(), kept[0])
    assert all((p != k).all() for p, k in zip(params[1:], kept[1:], strict=True))
    assert [p._version - v for p, v in zip(params, versions, strict=True)] == [0, 1, 1, 1]
    assert [int(optimizer.state[p]["step"]) for p in params] == [1, 2, 2, 2]


def test_the_first_step_may_be_skipped() -> None:
    params = parameters()
    optimizer = rulec.torch.optimizer(GUARDED)(params)
    give_gradients(params, 0)
    params[0].grad.fill_(torch.inf)  # type: ignore[union-attr]
    with pytest.warns(RuntimeWarning, match="skipped"):
        optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        advance(optimizer, params, range(1))
    assert all(optimizer.state[p]["step"] == 1 for p in params)
