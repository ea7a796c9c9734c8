"""Statistics of torch optimizers: the values, the same bits of parameters and states with them, and their schedule."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import rulec.torch
from rulec import RuleError
from rulec.errors import HyperError, RulecError

CLASSES = ["AdamW", "SGD", "LAMB", "Adafactor", "Muon", "ScheduleFreeAdamW", "Prodigy", "NAdam"]


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def trained(kind: str, steps: int = 3, **keywords: Any) -> tuple[nn.Module, Any, list[list[torch.Tensor]]]:
    """A model after some steps, its optimizer, and the parameters and gradients before the last step."""
    model = layers()
    params = [*model.named_parameters()]
    if kind == "Muon":
        params = [(name, p) for name, p in params if p.ndim == 2]
    optimizer = getattr(rulec.torch, kind)(params, **({"lr": 0.01} if kind == "SGD" else {}), **keywords)
    before: list[list[torch.Tensor]] = []
    for t in range(steps):
        torch.manual_seed(t)
        optimizer.zero_grad()
        model(torch.randn(8, 5)).square().mean().backward()
        before = [[p.detach().double().clone(), p.grad.double()] for _, p in params]  # type: ignore[union-attr]
        optimizer.step()
    return model, optimizer, before


def states_of(optimizer: Any) -> list[torch.Tensor]:
    states = optimizer.state_dict()["state"]
    return [value for each in states.values() for value in each.values() if isinstance(value, torch.Tensor)]


@pytest.mark.parametrize("kind", CLASSES)
def test_norms_are_those_that_torch_computes_after_the_step(kind: str) -> None:
    _, optimizer, before = trained(kind, watch="norms")
    statistics = optimizer.statistics()
    params = [p for group in optimizer.param_groups for p in group["params"]]
    names = [name for group in optimizer.param_groups for name in group["param_names"]]
    assert statistics.step == 3
    for name, param, (old, grad) in zip(names, params, before, strict=True):
        update = param.detach().double() - old
        wanted = {
            "grad_norm": grad.norm(), "param_norm": old.norm(), "update_norm": update.norm(),
            "update_ratio": update.norm() / old.norm(), "grad_ratio": grad.norm() / old.norm(),
            "cosine": (update * grad).sum() / update.norm() / grad.norm(),
            "unchanged": (param.detach().double() == old).sum().double(), "nonfinite": torch.tensor(0.0).double(),
        }  # fmt: skip
        assert [*statistics] == [
            "grad_norm", "update_norm", "param_norm", "update_ratio", "grad_ratio", "cosine", "nonfinite", "unchanged",
        ]  # fmt: skip
        for key, value in wanted.items():
            torch.testing.assert_close(statistics[key][name], value, rtol=3e-4, atol=1e-9)


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("every", [1, 2])
def test_parameters_and_states_have_the_same_bits_with_statistics(kind: str, every: int) -> None:
    model, optimizer, _ = trained(kind, steps=4, watch="norms", watch_every=every)
    plain, other, _ = trained(kind, steps=4)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), plain.parameters(), strict=True))
    assert all(torch.equal(s, t) for s, t in zip(states_of(optimizer), states_of(other), strict=True))
    assert optimizer.state_dict()["param_groups"] == other.state_dict()["param_groups"]


def test_a_schedule_measures_the_first_of_so_many_steps() -> None:
    model = layers()
    optimizer = rulec.torch.AdamW(model.parameters(), watch="norms", watch_every=3)
    assert optimizer.statistics().step == 0
    assert optimizer.statistics().numbers() == {}
    seen = []
    for _ in range(7):
        model(torch.randn(8, 5)).square().mean().backward()
        optimizer.step()
        seen.append(optimizer.statistics().step)
    assert seen == [1, 1, 1, 4, 4, 4, 7]


def test_numbers_have_flat_names_in_the_order_of_the_parameters() -> None:
    _, optimizer, _ = trained("AdamW", watch={"tot": 'norm(update, per="model")', "top": "max(v)", "rate": "2*lr"})
    numbers = optimizer.statistics().numbers()
    names = ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert [*numbers] == ["tot", *(f"top/{name}" for name in names), "rate/group 0"]
    assert all(type(value) is float for value in numbers.values())
    assert numbers["rate/group 0"] == 0.002
    lines = optimizer.statistics().table().splitlines()
    assert lines[0].split() == ["tot", "top", "rate"]
    assert lines[1].split()[0] == "0.weight"


def test_a_statistic_for_each_row_has_the_shape_of_such_a_state() -> None:
    model, optimizer, before = trained("AdamW", watch={"rows": 'max(abs(update), per="row")'})
    rows = optimizer.statistics()["rows"]
    assert rows["0.weight"].shape == (7, 1)
    update = (model[0].weight.detach().double() - before[0][0]).abs().amax(1, keepdim=True)  # type: ignore[index,union-attr]
    torch.testing.assert_close(rows["0.weight"], update, rtol=1e-3, atol=1e-8)
    assert optimizer.statistics().numbers() == {}


def test_only_parameters_with_a_gradient_have_statistics() -> None:
    model = layers()
    optimizer = rulec.torch.AdamW(model.named_parameters(), watch="norms")
    model[0](torch.randn(8, 5)).square().mean().backward()  # type: ignore[operator]
    optimizer.step()
    assert [*optimizer.statistics()["grad_norm"]] == ["0.weight", "0.bias"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_unchanged_weights_are_those_that_their_memory_keeps(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    param = torch.randn(4000, dtype=dtype).requires_grad_()
    optimizer = rulec.torch.AdamW([param], lr=1e-3, weight_decay=0, watch="norms")
    old, param.grad = param.detach().clone(), torch.randn(4000, dtype=dtype)
    optimizer.step()
    (unchanged,) = optimizer.statistics()["unchanged"].values()
    assert unchanged == (param.detach() == old).sum()
    assert (unchanged > 100) == (dtype is torch.bfloat16)


def test_copies_and_pickles_go_on_measuring() -> None:
    _, optimizer, _ = trained("AdamW", watch="norms")
    for other in (pickle.loads(pickle.dumps(optimizer)), copy.deepcopy(optimizer)):  # noqa: S301
        for group in other.param_groups:
            for param in group["params"]:
                param.grad = torch.ones_like(param)
        other.step()
        assert other.statistics()["grad_norm"]["0.bias"] == 7**0.5


@pytest.mark.parametrize(
    ("keywords", "kind", "message"),
    [
        ({"watch": "normz"}, RuleError, "AdamW has no statistic 'normz'; did you mean 'norms'?"),
        ({"watch": {"x": "m*g"}}, RuleError, "differs from element to element"),
        ({"watch": 3}, HyperError, "watch of AdamW is a name such as 'norms'"),
        ({"watch": "norms", "watch_every": 0}, HyperError, "watch_every of AdamW is a whole number of steps from 1"),
    ],
)
def test_a_mistake_is_named_when_the_optimizer_is_made(keywords: Any, kind: Any, message: str) -> None:
    with pytest.raises(kind, match=message.replace("(", r"\(").replace("?", r"\?")):
        rulec.torch.AdamW(layers().parameters(), **keywords)


def test_an_optimizer_that_measures_nothing_says_so() -> None:
    with pytest.raises(RulecError, match="AdamW measures no statistics: make it with watch='norms'"):
        rulec.torch.AdamW(layers().parameters()).statistics()
