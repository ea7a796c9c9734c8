"""Second learning rates follow the first, and defaults that mean the rate at the start keep it.

The oracles are torch's AdamW under a schedule of its own, and pytorch_optimizer's AdaBound.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any
from unittest import mock

import pytest
import pytorch_optimizer
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, LambdaLR

import rulec
import rulec.torch
from rulec.backend import registry
from rulec.language.hyper import followers
from tests.library import by_kind
from tests.runtime.elsewhere import Elsewhere

STEPS = 8

#: A warm-up from 0, and a cosine to 0.
SCHEDULES: dict[str, Callable[[int], float]] = {
    "warm-up": lambda i: min(1.0, i / 3), "cosine": lambda i: 0.5 + 0.5 * math.cos(math.pi * i / (STEPS - 1)),
}  # fmt: skip


@cache
def rules() -> list[str]:
    """The rules whose other tensors take AdamW with a learning rate of its own."""
    return [name for name in rulec.rules(wrappers=False) if "adamw_lr" in followers(rulec.load(name).settings)]


def parameters() -> list[nn.Parameter]:
    torch.manual_seed(1)
    return [nn.Parameter(torch.randn(shape, dtype=torch.float64)) for shape in ((6, 4), (5,), (3, 6))]


def draw(params: list[nn.Parameter], i: int) -> None:
    for p in params:
        p.grad = torch.cos(p.detach() * (i + 1))


def groups_of(params: list[nn.Parameter]) -> list[dict[str, Any]]:
    """A matrix; a vector and a table of embeddings."""
    return [{"params": params[:1], "tags": []}, {"params": params[1:], "tags": ["embedding"]}]


def adamw(optimizer: Any, params: list[nn.Parameter]) -> torch.optim.AdamW:
    """torch's AdamW, at the second rate of an optimizer."""
    group = optimizer.param_groups[1]
    eps, decay = group.get("adamw_eps", group.get("eps")), group.get("weight_decay", 0.0)
    return torch.optim.AdamW(params[1:], lr=group["adamw_lr"], betas=group["betas"], eps=eps, weight_decay=decay)


def apart(a: list[nn.Parameter], b: list[nn.Parameter]) -> float:
    return max(float((p - q).detach().abs().max()) for p, q in zip(a[1:], b[1:], strict=True))


def run(optimizer: Any, params: list[nn.Parameter], factor: Callable[[int], float], steps: range) -> None:
    for i in steps:
        for group, base in zip(optimizer.param_groups, optimizer.bases, strict=True):
            group["lr"] = base * factor(i)
        draw(params, i)
        optimizer.step()


def test_the_library_has_them() -> None:
    assert {"muon", "adamuon", "normuon", "dion", "dion2", "nordion2", "polargrad", "adago", "spel"} <= {*rules()}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", by_kind(rules()))
def test_embeddings_and_vectors_follow_a_schedule_as_torch_has_them(name: str, schedule: str) -> None:
    ours, theirs = parameters(), parameters()
    optimizer = rulec.torch.optimizer(name)(groups_of(ours), lr=0.02, adamw_lr=0.003)
    other = adamw(optimizer, theirs)
    schedulers = [LambdaLR(each, SCHEDULES[schedule]) for each in (optimizer, other)]
    for i in range(STEPS):
        before = [p.detach().clone() for p in ours]
        draw(ours, i)
        draw(theirs, i)
        optimizer.step()
        other.step()
        # AdaGO has a least step; Iso takes matrices apart and puts them together.
        if schedule == "warm-up" and i == 0 and name not in ("adago", "iso"):
            assert all(torch.equal(p, q) for p, q in zip(ours, before, strict=True))
        for scheduler in schedulers:
            scheduler.step()
    last = 2 if name == "iso" else 3  # Iso takes all matrices
    assert apart(ours[:last], theirs[:last]) < 1e-13


def test_wrapped_and_composed_rules_follow_too() -> None:
    for text in ("lookahead(muon)", "clip_by_value >> muon", "muon >> cautious"):
        settings = rulec.load(text).settings
        assert followers(settings) == ["adamw_lr"], text


def test_a_user_may_hold_it_fixed() -> None:
    for keywords in ({"lr_at_start": 0.0}, {}):
        ours, theirs = parameters(), parameters()
        optimizer = rulec.torch.Muon(groups_of(ours), lr=0.02, adamw_lr=0.003, **keywords)
        if not keywords:
            optimizer.param_groups[1]["lr_at_start"] = 0.0
        other = adamw(optimizer, theirs)
        for i in range(3):
            draw(ours, i)
            draw(theirs, i)
            optimizer.step()
            other.step()
            optimizer.param_groups[1]["lr"] *= 0.5
        assert apart(ours, theirs) < 1e-13


def resumed(way: str, optimizer: Any, params: list[nn.Parameter]) -> tuple[Any, list[nn.Parameter]]:
    """A run that goes on elsewhere."""
    if way == "copy":
        twin = copy.deepcopy(optimizer)
        return twin, [p for group in twin.param_groups for p in group["params"]]
    fresh = [nn.Parameter(p.detach().clone()) for p in params]
    again = rulec.torch.Muon(groups_of(fresh), lr=0.02, adamw_lr=0.003)
    if way == "dcp":
        model, other = nn.ParameterList(params), nn.ParameterList(fresh)
        set_optimizer_state_dict(other, again, copy.deepcopy(get_optimizer_state_dict(model, optimizer)))
        return again, fresh
    saved = copy.deepcopy(optimizer.state_dict())
    if way == "older":
        for group in saved["param_groups"]:
            del group["lr_at_start"]
    again.load_state_dict(saved)
    return again, fresh


@pytest.mark.parametrize("way", ["saved", "older", "copy", "dcp"])
def test_a_resumed_run_knows_the_start(way: str) -> None:
    straight, broken = parameters(), parameters()
    first, second = (rulec.torch.Muon(groups_of(p), lr=0.02, adamw_lr=0.003) for p in (straight, broken))
    first.bases = second.bases = [0.02, 0.02]
    run(first, straight, SCHEDULES["cosine"], range(STEPS))
    run(second, broken, SCHEDULES["cosine"], range(4))
    third, again = resumed(way, second, broken)
    third.bases = [0.02, 0.02]
    assert [group["lr_at_start"] for group in third.param_groups] == [0.02, 0.02]
    run(third, again, SCHEDULES["cosine"], range(4, STEPS))
    assert all(torch.equal(p, q) for p, q in zip(straight, again, strict=True))


def test_each_group_has_a_start_of_its_own() -> None:
    params = parameters()
    optimizer = rulec.torch.Muon([{"params": params[:1], "tags": []}], lr=torch.tensor(0.25))
    optimizer.add_param_group({"params": params[1:2], "tags": [], "lr": 0.125})
    optimizer.add_param_group({"params": params[2:], "tags": [], "lr": 0.01, "initial_lr": 0.5})
    assert [group["lr_at_start"] for group in optimizer.param_groups] == [0.25, 0.125, 0.5]
    scheduler = CosineAnnealingLR(optimizer, 10)
    assert scheduler.base_lrs == [0.25, 0.125, 0.5]
    assert "lr_at_start" not in rulec.torch.AdamW(parameters()).param_groups[0]


def test_a_rate_on_the_device_is_followed_there() -> None:
    plain = registry.get
    with mock.patch.object(registry, "get", lambda name: Elsewhere() if name == "elsewhere" else plain(name)):
        ours, theirs = parameters(), parameters()
        rate = torch.tensor(0.02, dtype=torch.float64)
        device = {"backend": "elsewhere", "capturable": True}
        optimizer: Any = rulec.torch.Muon(groups_of(ours), lr=rate, adamw_lr=0.003, **device)  # type: ignore[arg-type]
        other = adamw(optimizer, theirs)
        for i in range(4):
            rate.fill_(0.02 * SCHEDULES["cosine"](i))
            other.param_groups[0]["lr"] = 0.003 * SCHEDULES["cosine"](i)
            draw(ours, i)
            draw(theirs, i)
            optimizer.step()
            other.step()
    assert apart(ours, theirs) < 1e-13


# Defaults that mean the start


def trained(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> Tensor:
    params = parameters()[:1]
    optimizer = make(params)
    scheduler = ExponentialLR(optimizer, 0.7)
    for i in range(12):
        draw(params, i)
        optimizer.step()
        scheduler.step()
    return params[0].detach()


@pytest.mark.parametrize("amsbound", [False, True])
def test_bounds_close_in_under_a_schedule_as_theirs_do(amsbound: bool) -> None:
    keywords = {"lr": 0.05, "gamma": 0.9, "final_lr": 0.01}
    kind: Any = rulec.torch.AMSBound if amsbound else rulec.torch.AdaBound
    ours = trained(lambda params: kind(params, **keywords))
    theirs = trained(lambda params: pytorch_optimizer.AdaBound(params, ams_bound=amsbound, **keywords))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-15)


#: Rule -> the hyper-parameter whose default is the rate at the start.
DEFAULTS: Mapping[str, str] = {
    "adabound": "base_lr", "amsbound": "base_lr", "adamc": "max_lr", "corrected_decay(adam)": "max_lr",
    "fully_decoupled(adam)": "max_lr",
}  # fmt: skip


@pytest.mark.parametrize("name", DEFAULTS)
def test_a_default_is_the_rate_at_the_start(name: str) -> None:
    kind: Any = rulec.torch.optimizer(name)
    bounds = {"gamma": 0.9, "final_lr": 0.01}
    keywords = {"lr": 0.05, **(bounds if DEFAULTS[name] == "base_lr" else {})}
    by_default = trained(lambda params: kind(params, **keywords))
    fixed = trained(lambda params: kind(params, **keywords, **{DEFAULTS[name]: 0.05}))
    assert torch.equal(by_default, fixed)
    following = trained(lambda params: kind(params, **keywords, **{DEFAULTS[name]: 0.01}))
    assert not torch.equal(by_default, following)
