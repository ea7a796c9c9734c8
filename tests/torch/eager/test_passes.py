"""Two passes where all gradients must be known, and gradients that come in micro-batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import rulec.torch
from rulec.errors import RulecError, RuleError
from rulec.torch import EagerUpdate
from tests.torch.eager.training import equal, gone, loss_of, model, plain


def alike(a: nn.Module, b: nn.Module) -> bool:
    """Whether two models have equal parameters, bit for bit."""
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


# Clipping


@pytest.mark.parametrize("max_norm", [0.05, 1e3])
def test_clipping_is_that_of_torch(max_norm: float) -> None:
    ours, theirs = model(), model()
    opt, twin = EagerUpdate(ours, "lion", max_grad_norm=max_norm), plain(theirs, "lion")
    for number in range(5):
        loss = loss_of(ours, number)
        with opt.measure() as seen:
            loss.backward(retain_graph=True)
        assert gone(ours)
        with opt.backward():
            loss.backward()
        opt.step()
        twin.zero_grad()
        loss_of(theirs, number).backward()
        norm = nn.utils.clip_grad_norm_(theirs.parameters(), max_norm)
        twin.step()
        assert torch.equal(seen.norm, norm)  # type: ignore[arg-type]
    assert alike(ours, theirs)
    assert opt.report().fired == 9
    assert opt.report().peak_gradient_bytes <= 1.05 * 4800


def test_a_measurement_is_made_once_and_of_whole_gradients() -> None:
    net = model()
    opt = EagerUpdate(net, "adamw", max_grad_norm=1.0)
    loss = loss_of(net, 0)
    with opt.measure():
        loss.backward(retain_graph=True)
    with pytest.raises(RulecError, match="was measured already"), opt.measure():
        pass
    with opt.backward():
        loss.backward()
    opt.step()
    net[0].weight.grad = torch.zeros_like(net[0].weight)
    with pytest.raises(RulecError, match=r"measure\(\) needs whole gradients"), opt.measure():
        pass


def test_more_arrivals_than_expected_are_no_measurement() -> None:
    net = model()
    opt = EagerUpdate(net, "adamw", max_grad_norm=1.0, contributions=1)

    def twice() -> None:
        with opt.measure():
            loss_of(net, 0).backward()
            loss_of(net, 1).backward()

    with pytest.raises(RulecError, match=r"arrived 2 times in opt.measure\(\), where 1 were expected: nothing was"):
        twice()
    assert gone(net)
    opt.relearn()
    twice()
    with opt.backward():
        loss_of(net, 0).backward()
        loss_of(net, 1).backward()
    opt.step()


# Scaling


@pytest.mark.parametrize("by_scaler", [False, True])
@pytest.mark.parametrize("max_norm", [None, 0.05])
def test_scaling_is_that_of_torch(max_norm: float | None, by_scaler: bool) -> None:
    """An infinite gradient in the fourth step is skipped by both; the step may be taken through the scaler."""
    ours, theirs = model(), model()
    opt, twin = EagerUpdate(ours, "adamw", max_grad_norm=max_norm), plain(theirs, "adamw")
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=2) for _ in range(2)]
    for number in range(6):
        factor = float("inf") if number == 3 else 1.0
        loss = loss_of(ours, number) * factor
        with opt.measure(scalers[0]) as seen:
            scalers[0].scale(loss).backward(retain_graph=True)
        assert seen.finite is (number != 3)
        with opt.backward():
            scalers[0].scale(loss).backward()
        assert opt.report().dropped == (9 if number == 3 else 0)
        scalers[0].step(opt) if by_scaler else opt.step()
        scalers[0].update()
        twin.zero_grad()
        scalers[1].scale(loss_of(theirs, number) * factor).backward()
        scalers[1].unscale_(twin)
        if max_norm is not None:
            nn.utils.clip_grad_norm_(theirs.parameters(), max_norm)
        scalers[1].step(twin)
        scalers[1].update()
        assert scalers[0].get_scale() == scalers[1].get_scale()
    assert alike(ours, theirs)


def test_a_scaler_that_is_off_changes_nothing() -> None:
    net = model()
    opt = EagerUpdate(net, "adamw", max_grad_norm=1.0)
    loss = loss_of(net, 0)
    with opt.measure(torch.amp.GradScaler("cpu", enabled=False)) as seen:
        loss.backward(retain_graph=True)
    assert seen.norm is not None
    with opt.backward():
        loss.backward()
    opt.step()


# Micro-batches


def test_accumulation_is_that_of_torch() -> None:
    ours, theirs = model(), model()
    opt, twin = EagerUpdate(ours, "adamw"), plain(theirs, "adamw")
    for number in range(4):
        twin.zero_grad()
        for part in range(3):
            with opt.backward(last_microbatch=part == 2):
                (loss_of(ours, 3 * number + part) / 3).backward()
            (loss_of(theirs, 3 * number + part) / 3).backward()
        opt.step()
        twin.step()
    assert opt.report().fired == 9
    assert alike(ours, theirs)


FOLDED: list[tuple[Any, dict[str, Any]]] = [
    ("momentum", {"lr": 0.01}), ("signum", {}),
    (rulec.torch.SGD, {"momentum": 0.9, "weight_decay": 0.1, "lr": 0.01}),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "keywords"), FOLDED)
@pytest.mark.parametrize("early", [True, False])
def test_folded_gradients_take_one_step_with_one_decay(rule: Any, keywords: dict[str, Any], early: bool) -> None:
    ours, theirs = model(torch.float64), model(torch.float64)
    opt = EagerUpdate(rulec.torch.tagged_groups(ours), rule, accumulate="fold", **keywords)
    kind = rulec.torch.optimizer(rule) if isinstance(rule, str) else rule
    twin = kind(rulec.torch.tagged_groups(theirs), **keywords)
    for number in range(4):
        if not early:
            opt.relearn()
        twin.zero_grad()
        for part in range(3):
            with opt.backward(last_microbatch=part == 2):
                loss_of(ours, 3 * number + part).backward()
                assert all(p.grad is None for p in ours.parameters()), "a gradient was kept"
            loss_of(theirs, 3 * number + part).backward()
        opt.step()
        twin.step()
        assert (opt.report().fired, opt.report().deferred) == ((9, 0) if early and number else (0, 9))
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-11, atol=1e-12)
    for key, state in twin.state_dict()["state"].items():
        torch.testing.assert_close(opt.state_dict()["state"][key], state, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_a_rule_of_matrices_folds_where_no_tensor_goes_elsewhere() -> None:
    ours, theirs = (nn.Sequential(*model(torch.float64)[:1], nn.Linear(12, 5, bias=False).double()) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    opt, twin = EagerUpdate(ours, "normuon", accumulate="fold"), rulec.torch.optimizer("normuon")(theirs.parameters())
    for number in range(3):
        twin.zero_grad()
        for part in range(2):
            with opt.backward(last_microbatch=part == 1):
                loss_of(ours, 2 * number + part).backward()
            loss_of(theirs, 2 * number + part).backward()
        opt.step()
        twin.step()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-11, atol=1e-12)
    with pytest.raises(RuleError, match="AdamW cannot fold gradients"):
        EagerUpdate(model(), "normuon", accumulate="fold")


def test_a_checkpoint_waits_for_what_is_folded() -> None:
    net = model()
    opt = EagerUpdate(net, "momentum", accumulate="fold")
    with opt.backward(last_microbatch=False):
        loss_of(net, 0).backward()
    with pytest.raises(RulecError, match=r"state_dict\(\) in the middle of a step"):
        opt.state_dict()
    opt.param_groups[0]["lr"] = 0.5
    with pytest.raises(RulecError, match="'lr' of a parameter group was changed"), opt.backward():
        pass
    opt.param_groups[0]["lr"] = rulec.torch.optimizer("momentum")(net.parameters()).param_groups[0]["lr"]
    with opt.backward():
        loss_of(net, 1).backward()
    opt.step()
    assert equal(list(opt.state_dict()["state"]), [*range(9)])
