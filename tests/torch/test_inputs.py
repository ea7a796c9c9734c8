"""What a step is given beside gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import rulec
import rulec.torch
from rulec.errors import TensorError
from tests.torch.twins import give_gradients, parameters

POLYAK = """
name: Polyak
hyper: {eps: {default: 1e-8, min: 0}}
inputs: {loss: scalar}
step: |
  p = p - loss*g/(sum(g**2, per="model") + eps)
"""

NEWTON = """
name: DiagonalNewton
inputs: {curvature: like p}
step: |
  direction = g/curvature
"""


def polyak(params: list[Tensor]) -> Any:
    return rulec.torch.optimizer(rulec.parse(POLYAK))([{"params": [p]} for p in params])


def newton(params: list[Tensor]) -> Any:
    return rulec.torch.optimizer(rulec.parse(NEWTON))(params, lr=1.0)


def two() -> list[Tensor]:
    return [torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(1))]


@pytest.mark.parametrize("loss", [5.0, torch.tensor(5.0), torch.tensor([5.0], requires_grad=True)], ids=repr)
def test_a_number(loss: Any) -> None:
    params = two()
    params[0].grad, params[1].grad = torch.tensor([3.0, 0.0]), torch.tensor([4.0])
    polyak(params).step(inputs={"loss": loss})
    assert params[0].tolist() == pytest.approx([-0.6, 0.0])
    assert params[1].tolist() == pytest.approx([-0.8])


def test_the_loss_of_a_closure_is_the_input_of_that_name() -> None:
    param = torch.nn.Parameter(torch.tensor([3.0]))
    optimizer = polyak([param])

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (param**2).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == 9.0
    assert param.item() == pytest.approx(3.0 - 9.0 / 6.0)
    seen: list[Any] = []
    optimizer.register_step_pre_hook(lambda o, args, keywords: seen.append(keywords))
    optimizer.step(closure, inputs={"loss": 0.0})
    assert param.item() == pytest.approx(1.5)
    assert seen == [{"inputs": {"loss": 0.0}}]


def test_tensors_by_parameter_or_in_a_list() -> None:
    for given in (dict, list):
        params = two()
        params[1].grad = torch.tensor([4.0])
        values: Any = [None, torch.tensor([2.0], dtype=torch.float64)]
        newton(params).step(inputs={"curvature": dict(zip(params, values, strict=True)) if given is dict else values})
        assert [p.tolist() for p in params] == [[0.0, 0.0], [-2.0]]


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (None, "DiagonalNewton needs the input 'curvature' at every step"),
        ({"curvature": 3.0}, "must be a dict by parameter, or a list with a tensor for each of the 2 parameters"),
        ({"curvature": [torch.ones(2)]}, "for each of the 2 parameters, not 1"),
        ({"curvature": {}}, r"has no tensor for a parameter of shape \(2,\) that has a gradient"),
        ({"curvature": [torch.ones(3), torch.ones(1)]}, r"parameter 0 \(its curvature\) has shape \(3,\)"),
        ({"curvature": [torch.ones(2), torch.ones(1)], "loss": 1.0}, "DiagonalNewton has no input 'loss'"),
    ],
)
def test_what_does_not_fit_is_refused(inputs: Any, message: str) -> None:
    params = two()
    give_gradients(params, 0)
    with pytest.raises(TensorError, match=message):
        newton(params).step(inputs=inputs)
    assert all((p == 0).all() for p in params)


def test_a_rule_without_inputs_takes_none() -> None:
    params = parameters()
    give_gradients(params, 0)
    with pytest.raises(TensorError, match="AdamW has no input 'loss'"):
        rulec.torch.AdamW(params).step(inputs={"loss": 1.0})
    with pytest.raises(TensorError, match="the input 'loss' must be a number, not Tensor"):
        polyak(params).step(inputs={"loss": torch.ones(2)})
