"""States of groups and of the whole model: they stand in the groups, and go wherever these go."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

import rulec
import rulec.torch
from rulec.errors import HyperError, RuleError, StateMismatch
from tests.torch.test_agreement import wide_scalars
from tests.torch.test_rules import advance, through_a_file
from tests.torch.twins import difference, give_gradients, parameters


def prodigy(params: list[Tensor], **keywords: Any) -> torch.optim.Optimizer:
    groups = [{"params": params[:2]}, {"params": params[2:], "weight_decay": 0.1}]
    return rulec.torch.Prodigy(groups, d0=0.01, **keywords)


def test_the_distance_of_prodigy_stands_in_every_group() -> None:
    params = parameters()
    optimizer = prodigy(params)
    assert "d" not in optimizer.param_groups[0]
    advance(optimizer, params, range(20))
    first, second = optimizer.param_groups
    assert first["d"] == second["d"] > 0.01
    assert type(first["d"]) is float
    assert (first["model_updates"], "updates" in first) == (20, False)


def test_prodigy_is_that_of_another_library() -> None:
    """Over two groups, of one distance."""
    other = pytest.importorskip("pytorch_optimizer")
    ours, theirs = parameters(torch.float64), parameters(torch.float64)
    one = rulec.torch.Prodigy([{"params": ours[:2]}, {"params": ours[2:]}], d0=0.01, bias_correction=True)
    two = other.Prodigy(
        [{"params": theirs[:2]}, {"params": theirs[2:]}], lr=1.0, d0=0.01, bias_correction=True, weight_decay=0.0
    )
    advance(one, ours, range(20))
    with wide_scalars():
        advance(two, theirs, range(20))
    assert difference(ours, theirs) * torch.finfo(torch.float64).eps < 1e-12
    assert one.param_groups[1]["d"] == pytest.approx(two.param_groups[1]["d"], rel=1e-12)
    assert one.param_groups[1]["d"] > 0.013


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "checkpoint"])
@pytest.mark.parametrize("name", ["Prodigy", "DoG", "ScheduleFreeAdamW"])
def test_copies_go_on_alike_and_apart(name: str, way: str) -> None:
    params = parameters()
    kind = getattr(rulec.torch, name)
    optimizer = kind([{"params": params[:2]}, {"params": params[2:]}])
    advance(optimizer, params, range(5))
    if way == "checkpoint":
        others = [torch.nn.Parameter(p.detach().clone()) for p in params]
        other = kind([{"params": others[:2]}, {"params": others[2:]}])
        other.load_state_dict(through_a_file(optimizer.state_dict()))
    else:
        both = (optimizer, params)
        other, others = copy.deepcopy(both) if way == "deepcopy" else pickle.loads(pickle.dumps(both))  # noqa: S301
    advance(optimizer, params, range(5, 9))
    assert difference(others, params) > 1
    advance(other, others, range(5, 9))
    assert difference(others, params) == 0
    names = {"Prodigy": ["d", "num"], "DoG": ["r", "G"], "ScheduleFreeAdamW": ["lr_max", "weight_sum", "updates"]}
    for one, two in zip(optimizer.param_groups, other.param_groups, strict=True):
        assert [one[key] for key in names[name]] == [two[key] for key in names[name]]


def test_a_group_without_gradients_keeps_its_numbers_and_the_model_has_one() -> None:
    params = parameters()
    optimizer = rulec.torch.ScheduleFreeSGD([{"params": params[:2]}, {"params": params[2:]}], lr=0.1)
    advance(optimizer, params, range(2))
    weight = optimizer.param_groups[1]["weight_sum"]
    for p in params[2:]:
        p.grad = None
    optimizer.step()
    optimizer.step()
    assert optimizer.param_groups[1]["weight_sum"] == weight
    assert [group["updates"] for group in optimizer.param_groups] == [4, 2]
    model_wide = prodigy(params)
    advance(model_wide, params, range(1))
    for p in params[2:]:
        p.grad = None
    model_wide.step()
    first, second = model_wide.param_groups
    assert (first["d"], first["model_updates"]) == (second["d"], second["model_updates"])


def test_steps_of_groups_and_of_the_model_are_counted_apart() -> None:
    rule = """
name: Counting
state: {a: {init: 0, per: group}, b: {init: 0, per: model}}
step: |
  a = a + sum(g, per="group")
  b = b + sum(g, per="model")
  direction = g + 0*a + 0*b
"""
    params = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    optimizer = rulec.torch.optimizer(rulec.parse(rule))([{"params": [p]} for p in params])
    params[0].grad = params[1].grad = torch.ones(1)
    optimizer.step()
    params[0].grad = None
    optimizer.step()
    first, second = optimizer.param_groups
    assert [first[key] for key in ("a", "b", "updates", "model_updates")] == [1.0, 3.0, 1, 2]
    assert [second[key] for key in ("a", "b", "updates", "model_updates")] == [2.0, 3.0, 2, 2]


def test_a_group_that_joins_later_has_the_number_of_the_model() -> None:
    params = parameters()
    optimizer = rulec.torch.Prodigy(params[:2], d0=0.01)
    for _ in range(10):
        for p in params[:2]:
            p.grad = torch.ones_like(p)
        optimizer.step()
    distance = optimizer.param_groups[0]["d"]
    optimizer.add_param_group({"params": params[2:]})
    advance(optimizer, params, range(1))
    assert optimizer.param_groups[1]["d"] == optimizer.param_groups[0]["d"] >= distance > 0.01


def test_users_may_change_a_number() -> None:
    params = parameters()
    optimizer = prodigy(params)
    advance(optimizer, params, range(2))
    for group in optimizer.param_groups:
        group["d"] = 7.0
    advance(optimizer, params, range(2, 3))
    assert optimizer.param_groups[0]["d"] >= 7.0
    optimizer.param_groups[0]["d"] = 8.0
    kept = [p.detach().clone() for p in params]
    with pytest.raises(StateMismatch, match="d is one number of the whole model, and its groups have 8, 7"):
        advance(optimizer, params, range(3, 4))
    assert difference(params, kept) == 0


def test_a_hyper_parameter_of_the_model_must_be_the_same_in_all_groups() -> None:
    params = parameters()
    optimizer = rulec.torch.Prodigy([{"params": params[:2]}, {"params": params[2:], "d0": 0.5}], d0=0.01)
    kept = [p.detach().clone() for p in params]
    with pytest.raises(HyperError, match="d0 of Prodigy is part of a state of the whole model"):
        advance(optimizer, params, range(1))
    assert difference(params, kept) == 0


def test_a_checkpoint_of_other_groups_is_refused() -> None:
    params = parameters()
    optimizer = prodigy(params)
    advance(optimizer, params, range(2))
    saved = through_a_file(optimizer.state_dict())
    with pytest.raises(StateMismatch, match="the saved groups have 2, 2 parameters, where the optimizer's have 4"):
        rulec.torch.Prodigy(parameters()).load_state_dict(saved)
    for group in saved["param_groups"]:
        del group["d"]
    other = prodigy(parameters())
    with pytest.raises(StateMismatch, match="the saved groups have no d, which is kept per model"):
        other.load_state_dict(saved)
    assert other.state_dict()["state"] == {}
    saved["param_groups"][0]["d"], saved["param_groups"][1]["d"] = 1.0, 2.0
    with pytest.raises(StateMismatch, match="d is one number of the whole model"):
        other.load_state_dict(saved)


def test_groups_may_go_up_and_down_within_one_norm() -> None:
    """`maximize` in one group: the reduction over the model is still one."""
    kind = rulec.torch.optimizer(rulec.load("clip_by_global_norm") >> rulec.load("sgd"))
    params = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    optimizer = kind([{"params": params[:1]}, {"params": params[1:], "maximize": True}], lr=1.0, max_norm=1.0)
    params[0].grad, params[1].grad = torch.tensor([3.0]), torch.tensor([4.0])
    optimizer.step()
    assert [p.item() for p in params] == pytest.approx([-0.6, 0.8], abs=1e-5)


@pytest.mark.parametrize("name", ["params", "updates", "model_updates", "train_mode", "foreach"])
def test_a_state_that_would_hide_an_entry_of_groups_is_refused(name: str) -> None:
    lines = f"  {name} = {name} + t\n  direction = g/{name}"
    text = f"name: R\nstate: {{{name}: {{init: 0, per: group}}}}\nstep: |\n{lines}"
    says = f"R has a state '{name}', which torch's optimizers have for something else: call it otherwise, as {name}_"
    with pytest.raises(RuleError, match=says):
        rulec.torch.optimizer(rulec.parse(text))


def test_clipping_is_one_norm_over_groups_and_dtypes() -> None:
    """torch clips and steps in float64 and float32 by itself; ours does both in one step."""
    kind = rulec.torch.optimizer(rulec.load("clip_by_global_norm") >> rulec.load("adamw"))
    sides = [[*parameters(torch.float32)[:2], *parameters(torch.float64)[2:]] for _ in range(2)]
    keywords = {"lr": 0.01, "weight_decay": 0.1}
    groups = [[{"params": side[:2]}, {"params": side[2:], "lr": 0.003}] for side in sides]
    ours = kind(groups[0], max_norm=0.5, **keywords)
    theirs = torch.optim.AdamW(groups[1], foreach=False, **keywords)
    for number in range(20):
        for side in sides:
            give_gradients(side, number)
        torch.nn.utils.clip_grad_norm_(sides[1], 0.5)
        ours.step()
        theirs.step()
    assert difference(sides[0][:2], sides[1][:2]) <= 8
    # Theirs is clipped by a norm that was summed in float32.
    wide = zip(sides[0][2:], sides[1][2:], strict=True)
    assert max((a - b).abs().max().item() for a, b in wide) < 1e-6
