"""Hyper-parameters that kernels and states are made for: they hold from the first step on, in arrays and in torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import rulec.torch
from rulec.array import Optimizer
from rulec.errors import HyperError


@pytest.mark.parametrize(("rule", "name"), [("galore", "rank"), ("muon", "ns_steps"), ("shampoo", "every")])
def test_what_kernels_were_made_for_cannot_change(rule: str, name: str) -> None:
    param, grad = np.ones((6, 6)), np.random.default_rng(0).normal(size=(6, 6))
    opt = Optimizer(rule, [param], **{name: 3})
    opt.hyper[name] = 2
    opt.step([grad])
    before = param.copy()
    opt.hyper[name] = 4
    with pytest.raises(HyperError, match=rf"{name} of \w+ cannot change from 2 to 4 after the first step"):
        opt.step([grad])
    np.testing.assert_array_equal(param, before)
    opt.hyper[name] = 2
    opt.step([grad])
    assert int(opt.state("0")["step"]) == 2


def test_groups_of_torch_are_asked_each_by_itself() -> None:
    params = [torch.nn.Parameter(torch.ones(6, 6)) for _ in range(2)]
    opt = rulec.torch.GaLore([{"params": params[:1], "rank": 2}, {"params": params[1:], "rank": 3}])
    for param in params:
        param.grad = torch.randn(6, 6, generator=torch.Generator().manual_seed(0))
    opt.step()
    opt.param_groups[1]["rank"] = 2
    with pytest.raises(HyperError, match="rank of GaLore cannot change from 3 to 2"):
        opt.step()
