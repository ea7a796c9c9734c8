"""Groups with hyper-parameters and flags of their own, schedulers, hooks, closures: as in torch.optim."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook

import rulec.torch
from rulec.errors import BackendUnavailable, BackendUnsupported, HyperError, RulecError, TensorError
from tests.torch.twins import Twins, difference, give_gradients, parameters

SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda k: 0.9**k),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda k: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 4], 0.5),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, 3),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.1, 1.0, 4),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 8),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 8),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 3),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=10),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 0.05, 3),
}


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("rule", ["AdamW", "SGD"])
def test_schedulers(name: str, rule: str) -> None:
    """Numbers as torch's, and no warning. CyclicLR and OneCycleLR cycle betas and momentum, too."""
    keywords = {"lr": 0.1, "momentum": 0.9} if rule == "SGD" else {"lr": 0.1}
    kinds = [getattr(rulec.torch, rule), getattr(torch.optim, rule)]
    twins = Twins(kinds, lambda kind, params: kind(params, **keywords))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        schedules = [SCHEDULERS[name](o) for o in twins.optimizers]
        for number in range(8):
            twins.step(number)
            for schedule in schedules:
                schedule.step(*([1.0] if name == "ReduceLROnPlateau" else []))
    assert twins.optimizers[0].param_groups[0]["lr"] == twins.optimizers[1].param_groups[0]["lr"]
    assert twins.ulps() <= 8


def test_every_scheduler_of_torch_is_tested() -> None:
    assert set(lr_scheduler.__all__) - {"LRScheduler"} <= set(SCHEDULERS)


def test_a_tensor_is_a_learning_rate_and_schedulers_change_it_in_place() -> None:
    kinds = [rulec.torch.AdamW, torch.optim.AdamW]
    twins = Twins(kinds, lambda kind, params: kind(params, lr=torch.tensor(0.1), foreach=False))
    schedules = [lr_scheduler.ExponentialLR(o, 0.5) for o in twins.optimizers]
    for number in range(5):
        twins.step(number)
        for schedule in schedules:
            schedule.step()
    assert isinstance(twins.optimizers[0].param_groups[0]["lr"], torch.Tensor)
    assert twins.ulps() <= 8


def test_a_number_replaced_by_an_equal_tensor_is_followed() -> None:
    kinds = [rulec.torch.SGD, rulec.torch.SGD]
    twins = Twins(kinds, lambda kind, params: kind(params, lr=0.5))
    twins.step(0)
    twins.optimizers[0].param_groups[0]["lr"] = rate = torch.tensor(0.5)
    twins.step(1)
    rate.fill_(0.25)
    twins.optimizers[1].param_groups[0]["lr"] = 0.25
    twins.step(2)
    assert twins.ulps() == 0


def test_groups_with_other_flags_run_other_rules_in_one_step() -> None:
    def make(kind: Any, params: list[torch.Tensor]) -> torch.optim.Optimizer:
        groups = [
            {"params": params[:1], "amsgrad": True},
            {"params": params[1:2], "weight_decay": 0.0, "maximize": True},
            {"params": params[2:], "lr": 0.01, "betas": (0.5, 0.6)},
        ]
        return kind(groups, lr=0.1, foreach=False)  # type: ignore[no-any-return]

    twins = Twins([rulec.torch.AdamW, torch.optim.AdamW], make, torch.float64)
    for number in range(6):
        twins.step(number)
    assert twins.ulps() * torch.finfo(torch.float64).eps < 1e-12
    ours = twins.optimizers[0]
    assert "max_exp_avg_sq" in ours.state[twins.params[0][0]]
    assert "max_exp_avg_sq" not in ours.state[twins.params[0][1]]


def test_weight_decay_may_differ_within_one_rule() -> None:
    params = parameters()
    groups = [{"params": [p], "weight_decay": 0.1 * i} for i, p in enumerate(params)]
    optimizer = rulec.torch.AdamW(groups)
    give_gradients(params, 0)
    optimizer.step()
    assert optimizer._machine is not None
    assert len(optimizer._machine.engines) == 1


def test_groups_that_join_later_count_their_own_steps() -> None:
    kinds = [rulec.torch.Adam, torch.optim.Adam]
    twins = Twins(kinds, lambda kind, params: kind(params[:2], lr=0.1, foreach=False), torch.float64)
    twins.step(0)
    twins.step(1)
    for optimizer, params in zip(twins.optimizers, twins.params, strict=True):
        optimizer.add_param_group({"params": params[2:], "lr": 0.01})
    twins.step(2)
    twins.step(3)
    assert twins.ulps() * torch.finfo(torch.float64).eps < 1e-12
    state = twins.optimizers[0].state
    assert [int(state[p]["step"]) for p in twins.params[0]] == [4, 4, 2, 2]


def test_a_flag_that_changes_on_the_way_keeps_what_is_known() -> None:
    """SGD gains momentum, loses it and gains it again: torch keeps the buffer meanwhile, and so do we."""
    kinds = [rulec.torch.SGD, torch.optim.SGD]
    twins = Twins(kinds, lambda kind, params: kind(params, lr=0.1, foreach=False), torch.float64)
    for number, momentum in enumerate([0, 0.9, 0.9, 0, 0.8, 0.8]):
        for optimizer in twins.optimizers:
            optimizer.param_groups[0]["momentum"] = momentum
        twins.step(number)
    assert twins.ulps() * torch.finfo(torch.float64).eps < 1e-12


def test_weight_decay_may_start_at_zero_and_change() -> None:
    kinds = [rulec.torch.Adam, torch.optim.Adam]
    twins = Twins(kinds, lambda kind, params: kind(params, lr=0.1, foreach=False), torch.float64)
    for number, decay in enumerate([0, 0, 0.1, 0.2, 0, 0.3]):
        for optimizer in twins.optimizers:
            optimizer.param_groups[0]["weight_decay"] = decay
        twins.step(number)
    assert twins.ulps() * torch.finfo(torch.float64).eps < 1e-12


def test_infinite_parameters_stay_where_there_is_no_weight_decay() -> None:
    for kind in (rulec.torch.Adam, rulec.torch.SGD):
        param = torch.nn.Parameter(torch.tensor([1.0, -torch.inf]))
        param.grad = torch.tensor([1.0, 0.0])
        kind([param], lr=0.1).step()
        assert param[1] == -torch.inf


def test_parameters_without_gradients_are_left_alone() -> None:
    kinds = [rulec.torch.Adam, torch.optim.Adam]
    twins = Twins(kinds, lambda kind, params: kind(params, lr=0.1, foreach=False), torch.float64)
    for number in range(9):
        for params, optimizer in zip(twins.params, twins.optimizers, strict=True):
            optimizer.zero_grad()
            give_gradients(params, number)
            for place, p in enumerate(params):
                if (number >> place) & 1:
                    p.grad = None
            optimizer.step()
    assert twins.ulps() * torch.finfo(torch.float64).eps < 1e-12
    frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    optimizer = rulec.torch.Adam([frozen])
    optimizer.step()
    assert torch.equal(frozen, torch.ones(2))
    assert optimizer.state_dict()["state"] == {}


def test_named_parameters() -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = rulec.torch.AdamW(model.named_parameters())
    assert optimizer.param_groups[0]["param_names"] == ["weight", "bias"]
    assert optimizer.state_dict()["param_groups"][0]["param_names"] == ["weight", "bias"]
    model(torch.ones(1, 3)).sum().backward()
    model.weight.grad = model.weight.grad.to_sparse()  # type: ignore[union-attr]
    with pytest.raises(TensorError, match="the gradient of weight is sparse"):
        optimizer.step()


def test_a_closure_is_called_with_gradients_on_and_its_loss_returned() -> None:
    param = torch.nn.Parameter(torch.tensor([2.0]))
    optimizer = rulec.torch.SGD([param], lr=0.25)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (param**2).sum()
        loss.backward()
        return loss

    with torch.no_grad():
        loss = optimizer.step(closure)  # type: ignore[arg-type]
    assert loss.item() == 4.0  # type: ignore[attr-defined]
    assert param.item() == 1.0


def test_step_hooks_of_all_kinds_run_in_order() -> None:
    param = torch.nn.Parameter(torch.ones(1))
    param.grad = torch.ones(1)
    optimizer = rulec.torch.SGD([param], lr=0.5)
    seen: list[Any] = []
    optimizer.register_step_pre_hook(lambda o, args, kwargs: seen.append(("before", param.item())))
    handle = optimizer.register_step_post_hook(lambda o, args, kwargs: seen.append(("after", param.item())))
    everywhere = register_optimizer_step_post_hook(lambda o, args, kwargs: seen.append(("all", param.item())))
    optimizer.step()
    handle.remove()
    everywhere.remove()
    optimizer.step()
    assert seen == [("before", 1.0), ("after", 0.5), ("all", 0.5), ("before", 0.5)]


def test_the_profiler_sees_a_step() -> None:
    param = torch.nn.Parameter(torch.ones(1))
    param.grad = torch.ones(1)
    optimizer = rulec.torch.SGD([param], lr=0.5)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        optimizer.step()
    assert any(event.key == "Optimizer.step#SGD.step" for event in profile.key_averages())


def test_a_class_of_ones_own_may_build_on_one() -> None:
    class Twice(rulec.torch.SGD):  # type: ignore[misc]
        def __init__(self, params: Any) -> None:
            super().__init__(params, lr=0.5)

    param = torch.nn.Parameter(torch.ones(1))
    param.grad = torch.ones(1)
    Twice([param]).step()
    assert param.item() == 0.5


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"lr": -1.0}, "lr=-1.0 of AdamW must be at least 0"),
        ({"lr": float("nan")}, "lr=nan of AdamW must be at least 0"),
        ({"betas": (0.9, 1.0)}, "beta2=1.0 of AdamW must be at least 0 and below 1"),
        ({"betas": 0.9}, "betas=0.9 of AdamW must be 2 numbers"),
        ({"betas": (0.9,)}, "betas=(0.9,) of AdamW must be 2 numbers"),
        ({"eps": "small"}, "eps='small' of AdamW must be a number"),
        ({"weight_decay": None}, "weight_decay=None of AdamW must be a number"),
        ({"bta": 1}, "AdamW has no keyword 'bta'"),
        ({"beta1": 0.9}, "AdamW has no keyword 'beta1': give betas=(beta1, beta2)"),
        ({"weight_deacy": 0.1}, "did you mean 'weight_decay'?"),
        ({"differentiable": True}, "cannot be differentiable=True"),
        ({"state_dtype": "int9"}, "state dtype 'int9' is none of float32"),
        ({"state_dtype": {"exp_avgs": "float32"}}, "AdamW has no state 'exp_avgs'; did you mean 'exp_avg'?"),
    ],
)
def test_what_is_wrong_is_said_when_made(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(RulecError) as caught:
        rulec.torch.AdamW(parameters(), **keywords)
    assert message in str(caught.value)


def test_a_backend_may_be_named() -> None:
    param = torch.nn.Parameter(torch.ones(2))
    param.grad = torch.ones(2)
    rulec.torch.SGD([param], lr=0.5, backend="cpu").step()
    assert param.tolist() == [0.5, 0.5]
    with pytest.raises(BackendUnavailable, match="there is no backend 'cuda'"):
        rulec.torch.SGD([param], lr=0.5, backend="cuda")
    with pytest.raises(BackendUnsupported, match="arrays of type Tensor"):
        rulec.torch.SGD([param], lr=0.5, backend="numpy").step()
    assert param.tolist() == [0.5, 0.5]


def test_flags_that_mean_no_rule_are_refused() -> None:
    for keywords in ({"nesterov": True}, {"nesterov": True, "momentum": 0.9, "dampening": 0.1}):
        with pytest.raises(HyperError, match="SGD has no rule for momentum="):
            rulec.torch.SGD(parameters(), lr=0.1, **keywords)  # type: ignore[arg-type]
    with pytest.raises(HyperError, match="a group of Adam has 'beta1', which is no keyword: give betas"):
        rulec.torch.Adam([{"params": parameters(), "beta1": 0.5}])


def test_a_group_that_is_wrong_is_not_added() -> None:
    optimizer = rulec.torch.AdamW(parameters()[:1])
    with pytest.raises(HyperError, match="lr=-2"):
        optimizer.add_param_group({"params": parameters()[1:], "lr": -2.0})
    assert len(optimizer.param_groups) == 1


def test_a_value_that_leaves_its_range_later_writes_nothing() -> None:
    params = parameters()
    optimizer = rulec.torch.AdamW([{"params": params[:2]}, {"params": params[2:], "amsgrad": True}])
    give_gradients(params, 0)
    optimizer.step()
    before = [p.detach().clone() for p in params]
    optimizer.param_groups[1]["lr"] = -1.0
    with pytest.raises(HyperError, match=r"lr=-1\.0 of AdamW must be at least 0"):
        optimizer.step()
    assert all(torch.equal(p, b) for p, b in zip(params, before, strict=True))
    optimizer.param_groups[1]["lr"] = 0.1
    optimizer.step()
    assert not torch.equal(params[3], before[3])
    assert optimizer.state[params[0]]["step"].item() == 2


def test_hints_of_torch_are_accepted() -> None:
    params = parameters()
    give_gradients(params, 0)
    for hint in ("foreach", "fused", "capturable"):
        before = params[0].detach().clone()
        rulec.torch.AdamW(params, **{hint: True}).step()  # type: ignore[arg-type]
        assert not torch.equal(params[0], before)


def test_many_groups_are_one_launch() -> None:
    params = [torch.nn.Parameter(torch.ones(3)) for _ in range(500)]
    optimizer = rulec.torch.SGD([{"params": [p], "lr": 1e-3 * (i + 1)} for i, p in enumerate(params)], lr=0.1)
    for p in params:
        p.grad = torch.ones(3)
    optimizer.step()
    assert optimizer._machine is not None
    (engine,) = optimizer._machine.engines
    assert len(engine.buckets) == 1
    expected = [torch.full((3,), 1 - 1e-3 * (i + 1)) for i in range(500)]
    assert difference(params, expected) <= 1


@pytest.mark.parametrize("found_inf", [False, True])
def test_grad_scaler(found_inf: bool) -> None:
    param = torch.nn.Parameter(torch.ones(2))
    optimizer = rulec.torch.SGD([param], lr=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale((param * (torch.inf if found_inf else 1.0)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(param.detach(), torch.ones(2) * (1.0 if found_inf else 0.5))


def test_gradients_may_be_clipped() -> None:
    kinds = [rulec.torch.AdamW, torch.optim.AdamW]
    twins = Twins(kinds, lambda kind, params: kind(params, lr=0.1, foreach=False))
    for number in range(4):
        for params, optimizer in zip(twins.params, twins.optimizers, strict=True):
            give_gradients(params, number)
            torch.nn.utils.clip_grad_norm_(params, 0.1)
            optimizer.step()
    assert twins.ulps() <= 8


@pytest.mark.slow
def test_a_step_inside_a_compiled_function() -> None:
    """torch's compiler must not look inside a step, nor warn that it cannot."""
    model = torch.nn.Linear(3, 2)
    optimizer = rulec.torch.SGD(model.parameters(), lr=0.5)

    @torch.compile(backend="eager")
    def train(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    before = model.bias.detach().clone()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            train(torch.ones(1, 3))
    assert torch.equal(model.bias.detach(), before - 0.5 - 0.5 - 0.5)
