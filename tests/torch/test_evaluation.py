"""Training at one point and evaluating the model at another."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import rulec
import rulec.torch
from rulec.errors import RulecError
from tests.torch.test_rules import advance, through_a_file
from tests.torch.twins import difference, give_gradients, parameters


@pytest.mark.parametrize("name", ["ScheduleFreeAdamW", "ScheduleFreeSGD"])
def test_there_and_back_as_in_another_library(name: str) -> None:
    """Training, evaluating and training again; two groups with rates and moments of their own."""
    other = pytest.importorskip("pytorch_optimizer")
    own: dict[str, Any] = {"betas": (0.8, 0.9)} if name == "ScheduleFreeAdamW" else {"momentum": 0.8}
    sides = [parameters(torch.float64) for _ in range(2)]
    optimizers: list[Any] = [
        kind([{"params": side[:2]}, {"params": side[2:], "lr": 0.02}], lr=0.05, warmup_steps=3, **own)
        for kind, side in zip([getattr(rulec.torch, name), getattr(other, name)], sides, strict=True)
    ]
    for begin in (0, 6):
        for optimizer, side in zip(optimizers, sides, strict=True):
            optimizer.train()
            advance(optimizer, side, range(begin, begin + 6))
        trained = [p.detach().clone() for p in sides[0]]
        for optimizer in optimizers:
            optimizer.eval()
        assert difference(*sides) * torch.finfo(torch.float64).eps < 1e-12
        assert difference(sides[0], trained) > 1e3


def test_twice_is_once_and_no_step_is_taken_there() -> None:
    params = parameters()
    optimizer = rulec.torch.ScheduleFreeAdamW(params, lr=0.1)
    optimizer.eval()
    optimizer.train()
    advance(optimizer, params, range(3))
    trained = [p.detach().clone() for p in params]
    optimizer.eval()
    evaluated = [p.detach().clone() for p in params]
    optimizer.eval()
    assert difference(params, evaluated) == 0
    give_gradients(params, 3)
    with pytest.raises(RulecError, match=r"where ScheduleFreeAdamW is evaluated: call train\(\) before step\(\)"):
        optimizer.step()
    assert difference(params, evaluated) == 0
    optimizer.train()
    optimizer.train()
    assert difference(params, trained) <= 4
    assert optimizer.state[params[0]]["step"] == 3


def test_the_average_is_exchanged_bit_for_bit() -> None:
    kind: Any = rulec.torch.optimizer(rulec.load("ema")(rulec.load("adamw")))
    params = parameters()
    optimizer = kind(params, lr=0.1, ema_decay=0.9)
    advance(optimizer, params, range(4))
    trained = [p.detach().clone() for p in params]
    average = [optimizer.state[p]["average"].clone() for p in params]
    optimizer.eval()
    assert difference(params, average) == 0
    assert difference([optimizer.state[p]["average"] for p in params], trained) == 0
    optimizer.train()
    assert difference(params, trained) == 0


def test_the_model_s_output_is_that_of_the_average() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    optimizer = rulec.torch.ScheduleFreeSGD(model.parameters(), lr=0.5)
    x = torch.randn(16, 3)
    for _ in range(5):
        optimizer.zero_grad()
        (model(x) - 1).square().mean().backward()
        optimizer.step()
    points = {}
    for name, p in model.named_parameters():
        z = optimizer.state[p]["z"]
        points[name] = p.detach() + (1 - 1 / 0.9) * (z - p.detach())
    expected = torch.func.functional_call(model, points, (x,))
    seen = next(model.parameters())._version
    optimizer.eval()
    assert torch.allclose(model(x), expected, atol=1e-6)
    assert next(model.parameters())._version > seen


def test_a_checkpoint_says_where_the_parameters_are() -> None:
    params = parameters()
    optimizer = rulec.torch.ScheduleFreeAdamW(params, lr=0.1)
    advance(optimizer, params, range(4))
    optimizer.eval()
    saved = through_a_file(optimizer.state_dict())
    others = [torch.nn.Parameter(p.detach().clone()) for p in params]
    again = rulec.torch.ScheduleFreeAdamW(others, lr=0.1)
    again.load_state_dict(saved)
    with pytest.raises(RulecError, match="call train"):
        again.step()
    for o, side in ((optimizer, params), (again, others)):
        o.train()
        advance(o, side, range(4, 6))
    assert difference(others, params) == 0


def test_a_group_that_joins_while_evaluated_waits_for_training() -> None:
    params = parameters()
    optimizer = rulec.torch.ScheduleFreeAdamW(params[:2], lr=0.1)
    advance(optimizer, params[:2], range(2))
    optimizer.eval()
    kept = params[2].detach().clone()
    optimizer.add_param_group({"params": params[2:]})
    assert not optimizer.param_groups[1]["train_mode"]
    optimizer.train()
    assert torch.equal(params[2].detach(), kept)
    advance(optimizer, params, range(2, 3))
    assert not torch.equal(params[2].detach(), kept)


def test_rules_that_are_evaluated_where_they_train_have_no_such_method() -> None:
    optimizer = rulec.torch.AdamW(parameters())
    assert not hasattr(optimizer, "eval")
    assert not hasattr(optimizer, "train")
    assert "train_mode" not in optimizer.param_groups[0]
